//! LongFlow's choices for another policy to carry out.

use std::sync::Arc;

use burn::tensor::{DType, Int, Tensor};
use kv_core::{Budget, LayerCache, Room, Selection};
use kv_kernels::{AttentionOutput, DecodeAttentionOptions, GroupReduction};

use super::{LongFlow, NAME};
use crate::{
    Attended, Capabilities, Eviction, EvictionPolicy, LayerContext, Needs, Observation, Plan,
    Policy, PolicyError, Result, Scope, Step,
};

/// The slot of least `Σ α ‖v‖₁` is given up behind every step: [`LongFlow`]'s choice, made behind
/// the attention rather than within it, so that someone else can do something with the slot before
/// its place is free.
#[derive(Debug)]
struct PostAttention(LongFlow);

impl LongFlow {
    /// The policy as an evictor.
    pub(super) fn evictor(self) -> Arc<dyn EvictionPolicy> {
        Arc::new(PostAttention(self))
    }
}

/// Each slot's score summed over the heads of its layer, which hold equally many slots in one
/// order.
fn over_heads(cache: &LayerCache, scores: &Tensor<1>) -> Tensor<1> {
    let (batch, heads) = (cache.layout().batch(), cache.layout().kv_heads());
    let offsets = cache.ranges().offsets.clone().reshape([batch, heads]);
    let slots = scores.dims()[0];
    let device = scores.device();
    let pairs = cache.slot_pairs().clone();
    // Where a slot is within its head's range.
    let slot = Tensor::<1, Int>::arange(0..slots as i64, (&device, DType::I32));
    let place = slot - offsets.clone().reshape([batch * heads]).select(0, pairs.clone());
    let rows = pairs.div_scalar(heads as i32);
    let of_head = |head: usize| {
        let first = offsets.clone().narrow(1, head, 1).reshape([batch]).select(0, rows.clone());
        // Beyond a range there is nothing that counts.
        scores.clone().select(0, (first + place.clone()).clamp(0, slots as i32 - 1))
    };
    (1..heads).fold(of_head(0), |sum, head| sum + of_head(head))
}

impl Policy for PostAttention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        self.0.config()
    }

    fn needs(&self) -> Needs {
        self.0.needs()
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        self.0.select(observation)
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        let limit = self.0.limit(observation);
        self.0.check_protected(limit)?;
        let limits = selection.lengths().iter().map(|&kept| kept.max(limit));
        Ok(cache.set_limits(limits.collect())?)
    }

    fn room(&self, observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        Ok(Room::Limited { limit: self.0.limit(observation), over: 1, new_tokens })
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { changes_decode: true, ..Capabilities::default() }
    }

    fn is_recordable(&self, cache: &LayerCache) -> bool {
        cache.at_limits() && !cache.options().growable
    }

    fn step(&self, layer: LayerContext, cache: &mut LayerCache, step: Step) -> Result<Tensor<3>> {
        let attended = self.attend(layer, cache, &step)?;
        if let Some(due) = attended.due {
            due.apply_to(cache)?;
        }
        Ok(attended.output)
    }

    fn into_eviction_policy(self: Arc<Self>) -> Option<Arc<dyn EvictionPolicy>> {
        Some(self)
    }
}

impl EvictionPolicy for PostAttention {
    fn protected(&self, slots: usize, decoding: bool) -> Result<[usize; 2]> {
        if decoding {
            return Ok(self.0.guarded());
        }
        let (_, ends) = self.0.fitted(slots)?;
        Ok(ends)
    }

    fn budget(&self) -> Budget {
        self.0.budget
    }

    fn with_budget(&self, budget: Budget) -> Result<Arc<dyn EvictionPolicy>> {
        let evictor = LongFlow { budget, ..self.0 };
        evictor.validate()?;
        Ok(Arc::new(Self(evictor)))
    }

    fn rank(&self, observation: &Observation<'_>) -> Result<Option<(Tensor<3>, usize)>> {
        if self.heads_choose() { self.0.rank(observation) } else { Ok(None) }
    }

    fn heads_choose(&self) -> bool {
        self.0.scope == Scope::Head
    }

    fn attend(
        &self,
        _layer: LayerContext,
        cache: &mut LayerCache,
        step: &Step,
    ) -> Result<Attended> {
        let query = step.append(cache)?;
        let options =
            DecodeAttentionOptions { logits: true, log_sum_exp: true, ..Default::default() };
        let AttentionOutput { output, logits, log_sum_exp, .. } =
            cache.attend(query.clone(), options)?;
        let missing = |what| PolicyError::MissingObservation { policy: NAME, what };
        let logits = logits.ok_or_else(|| missing("logits"))?;
        let log_sum_exp = log_sum_exp.ok_or_else(|| missing("log-sum-exp"))?;
        let limits = cache.limits().map(<[usize]>::to_vec).unwrap_or_default();
        let mut lengths = cache.layout().lengths().iter().zip(&limits);
        let due = if lengths.any(|(length, limit)| length > limit) {
            let sum = GroupReduction::Sum;
            let shares = cache.probabilities(logits.clone(), log_sum_exp.clone(), sum)?;
            let norms = cache.values().clone().cast(DType::F32).abs().sum_dim(1);
            let mut scores = shares * norms.squeeze_dim(1);
            if self.0.scope == Scope::Layer {
                scores = over_heads(cache, &scores);
            }
            let victims = cache.lowest_unprotected(scores, &step.position, self.0.guarded())?;
            Some(Eviction::One { victims, limits })
        } else {
            None
        };
        Ok(Attended { output, query, logits, log_sum_exp, due })
    }
}
