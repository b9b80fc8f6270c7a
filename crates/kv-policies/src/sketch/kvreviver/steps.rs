//! Steps of layers whose dropped tokens go into a sketch.

use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{
    DecodeAttentionOptions, NO_SLOT, SketchScores, SketchStrategy, SketchUpdateOptions,
    SketchedTokens, SlotRanges, StepLogits, decode_attention, scatter_rows, sketch_attention,
    update_sketch,
};

use kv_core::{Error, LayerCache, Result, expect_shape};

use super::sketch::Sketch;

/// The attention over slots and sketch, and the logits that [`Sketch::update`] needs.
#[derive(Debug, Clone)]
pub struct SketchedOutput {
    /// `[B, Hq, D]`
    pub output: Tensor<3>,
    /// The step's logits.
    pub logits: StepLogits,
}

impl Sketch {
    /// Gives a cache sketches that dropped tokens go into.
    ///
    /// # Errors
    /// [`Error::Shape`] for sketches of other heads; [`Error::InvalidPlan`] for a cache with
    /// weights.
    pub fn put_into(self, cache: &mut LayerCache) -> Result<()> {
        expect_shape("sketch heads", &[self.heads().len()], &[cache.layout().head_ranges()])?;
        if cache.log_weights().is_some() {
            let reason = "slots have weights, expected slots of weight 1".into();
            return Err(Error::InvalidPlan { what: "sketch", reason });
        }
        cache.insert_policy_state(self);
        Ok(())
    }

    /// The sketches of a cache.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] where it has none.
    pub fn of(cache: &LayerCache) -> Result<&Self> {
        cache.policy_state().ok_or_else(without)
    }

    /// Attention of one query per sequence over a cache's live slots and over all tokens in the
    /// sketches.
    ///
    /// # Shapes
    /// `query` `[B, Hq, D]`; `newest` `[B]`, 32-bit: the newest tokens' positions.
    ///
    /// # Errors
    /// The errors of [`sketch_attention`] and [`decode_attention`].
    pub fn attend(
        &self,
        cache: &LayerCache,
        query: Tensor<3>,
        newest: &Tensor<1, Int>,
    ) -> Result<SketchedOutput> {
        if self.options().rebuild {
            return self.attend_rebuilt(cache, query, newest);
        }
        let slots = [cache.keys().clone(), cache.values().clone()];
        let longest = cache.layout().most_capacity();
        let tokens = SketchedTokens {
            sketch: self.source(),
            scores: self.scores(),
            newest,
            longest: self.tokens(),
            strategy: SketchStrategy::Auto,
        };
        let attended = sketch_attention(query, slots, cache.ranges(), longest, tokens)?;
        Ok(SketchedOutput {
            output: attended.output,
            logits: StepLogits {
                slots: Some(attended.slot_logits),
                tokens: attended.token_logits,
                log_sum_exp: attended.log_sum_exp,
            },
        })
    }

    /// [`Self::attend`] over a cache that is rebuilt in scratch memory.
    fn attend_rebuilt(
        &self,
        cache: &LayerCache,
        query: Tensor<3>,
        newest: &Tensor<1, Int>,
    ) -> Result<SketchedOutput> {
        let layout = cache.layout();
        let (total_kv_heads, tokens, head_dim) =
            (layout.head_ranges(), self.tokens(), cache.head_dim());
        let [batch, kv_heads] = [layout.batch(), layout.kv_heads()];
        let [keys, values] = self.rebuild(cache)?;
        let lengths = newest.clone().add_scalar(1).unsqueeze_dim::<2>(1);
        let ranges = SlotRanges {
            offsets: self.first_tokens().reshape([batch, kv_heads]),
            lengths: lengths.expand([batch, kv_heads]),
        };
        let options = DecodeAttentionOptions {
            logits: true,
            log_sum_exp: true,
            longest: Some(tokens),
            ..Default::default()
        };
        let rows = |tensor: Tensor<3>| tensor.reshape([total_kv_heads * tokens, head_dim]);
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
    /// The errors of [`kv_kernels::sketch_query`].
    pub fn rebuild(&self, cache: &LayerCache) -> Result<[Tensor<3>; 2]> {
        let device = &cache.options().device;
        let (total_kv_heads, tokens, head_dim) =
            (cache.layout().head_ranges(), self.tokens(), cache.head_dim());
        let all = Tensor::<1, Int>::arange(0..tokens as i64, (device, DType::I32));
        let all = all.unsqueeze_dim::<2>(0).expand([total_kv_heads, tokens]);
        let absent = self.scores().clone().lower_scalar(0.0).reshape([total_kv_heads, tokens]);
        let estimated = self.query(all.mask_fill(absent, NO_SLOT), cache.options().dtype)?;
        // Slots that are not live are written nowhere.
        let slots = cache.positions().dims()[0];
        let place = Tensor::<1, Int>::arange(0..slots as i64, (device, DType::I32));
        let of_slots = |of: &Tensor<2, Int>| {
            of.clone().reshape([total_kv_heads]).select(0, cache.slot_ranges().clone())
        };
        let place = place - of_slots(&cache.ranges().offsets);
        let dead = place.greater_equal(of_slots(&cache.ranges().lengths));
        let rows =
            cache.slot_ranges().clone().mul_scalar(tokens as i32) + cache.positions().clone();
        let rows = rows.mask_fill(dead, NO_SLOT);
        let [keys, values] = estimated;
        let filled = |estimated: Tensor<3>, pool: &Tensor<2>| -> Result<Tensor<3>> {
            let mut all = estimated.reshape([total_kv_heads * tokens, head_dim]);
            scatter_rows(&mut all, rows.clone(), pool.clone())?;
            Ok(all.reshape([total_kv_heads, tokens, head_dim]))
        };
        Ok([filled(keys, cache.keys())?, filled(values, cache.values())?])
    }

    /// Ends a step of a cache with sketches: scores of slots, a track, and of tokens in sketches
    /// grow by the step's probabilities, surplus slots go into the sketches, and tokens change
    /// places, as [`update_sketch`] says.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] without sketches or scores, [`Error::Kernel`].
    pub fn update(
        cache: &mut LayerCache,
        logits: StepLogits,
        newest: Tensor<1, Int>,
    ) -> Result<()> {
        let mut sketch = cache.take_policy_state::<Self>().ok_or_else(without)?;
        let options = sketch.options();
        let options = SketchUpdateOptions {
            slack: options.slack,
            replace_rate: options.replace_rate.unwrap_or(f32::INFINITY),
            longest: sketch.tokens(),
        };
        let updated = cache.change_slots([Self::SCORES], |pool, ranges, [slots]| {
            let parts = sketch.parts();
            let scores = SketchScores { slots, tokens: parts.scores, moved: parts.counters };
            Ok(update_sketch(parts.pool, pool, ranges, scores, logits, newest, options)?)
        });
        let lengths = cache.layout().lengths().iter().enumerate();
        let lengths: Vec<usize> =
            lengths.map(|(range, &length)| sketch.length_after(range, length)).collect();
        cache.insert_policy_state(sketch);
        updated?;
        cache.set_host_lengths(&lengths)
    }
}

fn without() -> Error {
    Error::InvalidPlan { what: "step", reason: "the cache has no sketches".into() }
}
