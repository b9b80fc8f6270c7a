//! Steps of layers whose dropped tokens go into a sketch.

use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{
    DecodeAttentionOptions, ReviseOptions, RevisedScores, SketchedTokens, SlotRanges, StepLogits,
    decode_attention, revise_sketch, scatter_rows, sketch_attention,
};

use crate::{Error, LayerCache, Result, Sketch};

/// The track of what slots' tokens have accumulated, beside a sketch.
pub const ACCUMULATED: &str = "score";

/// Attention over slots and sketch, and what [`LayerCache::revise_sketch`] wants to know of it.
#[derive(Debug, Clone)]
pub struct SketchedOutput {
    /// `[B, Hq, D]`
    pub output: Tensor<3>,
    /// The step's logits.
    pub logits: StepLogits,
}

impl LayerCache {
    /// The sketches that dropped tokens go into, where a policy keeps them.
    pub fn sketch(&self) -> Option<&Sketch> {
        self.sketch.as_ref()
    }

    /// Gives dropped tokens a sketch to go into.
    ///
    /// # Errors
    /// [`Error::Shape`] for sketches of other heads; [`Error::InvalidPlan`] for a cache with
    /// weights.
    pub fn set_sketch(&mut self, sketch: Sketch) -> Result<()> {
        super::expect_shape("sketch heads", &[sketch.heads().len()], &[self.layout.pairs()])?;
        if self.log_weights.is_some() {
            let reason = "slots have weights, expected slots of weight 1".into();
            return Err(Error::InvalidPlan { what: "sketch", reason });
        }
        self.sketch = Some(sketch);
        Ok(())
    }

    /// Attention of one query per sequence over its live slots and over all tokens in its sketches.
    ///
    /// # Shapes
    /// `query` `[B, Hq, D]`; `newest` `[B]`, 32-bit: the newest tokens' positions.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] without sketches; see [`sketch_attention`] and [`decode_attention`].
    pub fn attend_sketched(
        &self,
        query: Tensor<3>,
        newest: &Tensor<1, Int>,
    ) -> Result<SketchedOutput> {
        let sketch = self.sketch.as_ref().ok_or_else(without)?;
        if sketch.options().rebuild {
            return self.attend_rebuilt(sketch, query, newest);
        }
        let slots = [self.keys.clone(), self.values.clone()];
        let longest = self.layout.capacities().iter().max().copied().unwrap_or_default();
        let tokens = SketchedTokens {
            sketch: sketch.source(),
            scores: sketch.scores(),
            newest,
            longest: sketch.tokens(),
        };
        let attended = sketch_attention(query, slots, &self.ranges, longest, tokens)?;
        Ok(SketchedOutput {
            output: attended.output,
            logits: StepLogits {
                slots: Some(attended.slot_logits),
                tokens: attended.token_logits,
                log_sum_exp: attended.log_sum_exp,
            },
        })
    }

    /// The same over a cache that is rebuilt in scratch memory.
    fn attend_rebuilt(
        &self,
        sketch: &Sketch,
        query: Tensor<3>,
        newest: &Tensor<1, Int>,
    ) -> Result<SketchedOutput> {
        let (pairs, tokens, head_dim) = (self.layout.pairs(), sketch.tokens(), self.head_dim());
        let [batch, kv_heads] = [self.layout.batch(), self.layout.kv_heads()];
        let [keys, values] = self.rebuild(sketch)?;
        let lengths = newest.clone().add_scalar(1).unsqueeze_dim::<2>(1);
        let ranges = SlotRanges {
            offsets: sketch.first_tokens().reshape([batch, kv_heads]),
            lengths: lengths.expand([batch, kv_heads]),
        };
        let options = DecodeAttentionOptions {
            logits: true,
            log_sum_exp: true,
            longest: Some(tokens),
            ..Default::default()
        };
        let rows = |tensor: Tensor<3>| tensor.reshape([pairs * tokens, head_dim]);
        let attended = decode_attention(query, rows(keys), rows(values), None, &ranges, options)?;
        let missing = |what| Error::InvalidPlan { what, reason: "the attention left none".into() };
        Ok(SketchedOutput {
            output: attended.output,
            logits: StepLogits {
                slots: None,
                tokens: attended.logits.ok_or_else(|| missing("logits"))?,
                log_sum_exp: attended.log_sum_exp.ok_or_else(|| missing("log-sum-exp"))?,
            },
        })
    }

    /// Keys and values of all tokens that the cache stands for, each at its position,
    /// `[B * Hkv, tokens, D]`: exact ones as they are, others estimated (KVReviver, algorithm 4).
    /// Zeros where there is no token.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] without sketches.
    pub fn revive(&self) -> Result<[Tensor<3>; 2]> {
        self.rebuild(self.sketch.as_ref().ok_or_else(without)?)
    }

    fn rebuild(&self, sketch: &Sketch) -> Result<[Tensor<3>; 2]> {
        let device = &self.options.device;
        let (pairs, tokens, head_dim) = (self.layout.pairs(), sketch.tokens(), self.head_dim());
        let all = Tensor::<1, Int>::arange(0..tokens as i64, (device, DType::I32));
        let all = all.unsqueeze_dim::<2>(0).expand([pairs, tokens]);
        let absent = sketch.scores().clone().lower_scalar(0.0).reshape([pairs, tokens]);
        let estimated = sketch.query(all.mask_fill(absent, -1), self.options.dtype)?;
        // Dead slots go nowhere.
        let slots = self.slots();
        let place = Tensor::<1, Int>::arange(0..slots as i64, (device, DType::I32));
        let of_slots =
            |of: &Tensor<2, Int>| of.clone().reshape([pairs]).select(0, self.slot_pairs().clone());
        let place = place - of_slots(&self.ranges.offsets);
        let dead = place.greater_equal(of_slots(&self.ranges.lengths));
        let rows = self.slot_pairs().clone().mul_scalar(tokens as i32) + self.positions.clone();
        let rows = rows.mask_fill(dead, -1);
        let [keys, values] = estimated;
        let filled = |estimated: Tensor<3>, pool: &Tensor<2>| -> Result<Tensor<3>> {
            let mut all = estimated.reshape([pairs * tokens, head_dim]);
            scatter_rows(&mut all, rows.clone(), pool.clone())?;
            Ok(all.reshape([pairs, tokens, head_dim]))
        };
        Ok([filled(keys, &self.keys)?, filled(values, &self.values)?])
    }

    /// Ends a step: the track [`ACCUMULATED`] of slots and the scores of tokens in sketches grow by
    /// the step's probabilities, surplus slots go into the sketches, and tokens change places, as
    /// [`revise_sketch`] says.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] without sketches or track, [`Error::Kernel`].
    pub fn revise_sketch(&mut self, logits: StepLogits, newest: Tensor<1, Int>) -> Result<()> {
        let mut sketch = self.sketch.take().ok_or_else(without)?;
        let options = sketch.options();
        let options = ReviseOptions {
            slack: options.slack,
            replace_rate: options.replace_rate.unwrap_or(f32::INFINITY),
            longest: sketch.tokens(),
        };
        let revised = self.with_tracks([ACCUMULATED], |cache, [track]| {
            let parts = sketch.parts();
            let (pool, ranges) = cache.pool();
            let scores = RevisedScores {
                slots: &mut track.values,
                tokens: parts.scores,
                moved: parts.moved,
            };
            Ok(revise_sketch(parts.pool, pool, ranges, scores, logits, newest, options)?)
        });
        if revised.is_ok() {
            let lengths = self.layout.lengths_mut().iter_mut().enumerate();
            lengths.for_each(|(pair, length)| *length = sketch.length_after(pair, *length));
        }
        self.sketch = Some(sketch);
        revised
    }
}

fn without() -> Error {
    Error::InvalidPlan { what: "step", reason: "the cache has no sketches".into() }
}
