//! Which merges a slot takes: pristine slots take none, and one background slot of each head takes
//! the victims that resemble no other slot.

use burn::tensor::{DType, Tensor};
use kv_core::{LayerCache, Selection};
use kv_kernels::{TAKES_ANY, TAKES_NONE, TAKES_SIMILAR};

use super::KeepKv;
use super::scores::{LOG_SAMPLES, LOG_SCORES};
use crate::policy::ends::protected;
use crate::{EvictionRule, Observation, Result};

/// Track of the victims that each slot takes.
pub(super) const TAKES: &str = "takes";

impl KeepKv {
    /// Whether slots differ in the victims that they take.
    fn is_choosy(&self) -> bool {
        self.options.pristine > 0.0 || self.options.background
    }

    /// First and last tokens that a head of `slots` slots always keeps as they are: one slot of the
    /// head is left to be the background.
    fn ends_beside_background(&self, slots: usize, [sinks, recents]: [usize; 2]) -> [usize; 2] {
        let room = slots.saturating_sub(usize::from(self.options.background));
        let sinks = sinks.min(room);
        [sinks, recents.min(room - sinks)]
    }

    /// The kept tokens of a prompt that take no merges: of each head the share with the highest
    /// scores. Where protected tokens are spared, they are of them, and the share is of the others.
    pub(super) fn pristine(
        &self,
        observation: &Observation<'_>,
        kept: &Selection,
    ) -> Result<Selection> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        let total_kv_heads = batch * kv_heads;
        let slots = kept.lengths().iter().copied().min().unwrap_or_default();
        // The evictor keeps all of a prompt that is shorter than its protected tokens.
        let [sinks, recents] = match self.options.spare_protected && slots < tokens {
            true => self.evictor.protected(slots, false)?,
            false => [0, 0],
        };
        let scores = protected(self.evictor.scores(observation, slots)?, sinks, recents);
        let gone = kept.marks(tokens, &observation.keys.device())?.equal_scalar(0.0);
        let scores = scores.reshape([total_kv_heads, tokens]).mask_fill(gone, f32::NEG_INFINITY);
        let counts = kept.lengths().iter().map(|&kept| {
            let spared = (sinks + recents).min(kept);
            let share = (kept - spared) as f64 * self.options.pristine;
            (spared + share as usize).min(kept)
        });
        let counts: Vec<usize> = counts.collect();
        Ok(Selection::highest_of(scores, &vec![tokens; total_kv_heads], &counts)?)
    }

    /// Says which victims each slot of a prompt takes, and those that follow. The background slot
    /// is the one of lowest predicted score, which attention would miss least. It is not pristine.
    ///
    /// Pristine slots are marked once. Their order by predicted scores changes with every step, and
    /// a slot that has taken a merge is no longer its own token.
    pub(super) fn choose_takers(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        if !self.is_choosy() {
            return Ok(());
        }
        let [batch, kv_heads, tokens, _] = observation.dims();
        let device = observation.keys.device();
        let takes = match self.options.pristine > 0.0 {
            true => self.pristine(observation, selection)?.marks(tokens, &device)?,
            false => Tensor::zeros([batch * kv_heads, tokens], (&device, DType::F32)),
        };
        // Marks of tokens that are not pristine are 0, as `TAKES_SIMILAR` is.
        cache.set_kept_track(TAKES, takes.mul_scalar(TAKES_NONE), selection, TAKES_SIMILAR)?;
        if !self.options.background {
            return Ok(());
        }
        let tracks = [LOG_SCORES, LOG_SAMPLES].map(|name| cache.track(name).cloned());
        let [Some(scores), Some(samples)] = tracks else { return Ok(()) };
        let newest = observation.positions.clone().narrow(1, tokens - 1, 1).reshape([batch]);
        let least = |slots: &[usize]| slots.iter().copied().min().unwrap_or_default();
        let slots = least(cache.limits().unwrap_or(selection.lengths()));
        // The evictor keeps all of a prompt that is shorter than its protected tokens.
        let ends = match slots == tokens && cache.limits().is_none() {
            true => [0, 0],
            false => self.evictor.protected(slots, false)?,
        };
        let ends = self.ends_beside_background(slots, ends);
        let slots = cache.lowest_unprotected(scores - samples, &newest, ends)?;
        let slots = slots.reshape([batch * kv_heads]);
        let any = Tensor::full([batch * kv_heads], TAKES_ANY, (&device, DType::F32));
        Ok(cache.write_track(TAKES, &slots, any)?)
    }

    /// An eviction that never chooses the background slot.
    pub(super) fn sparing_background<'a>(&'a self, rule: EvictionRule<'a>) -> EvictionRule<'a> {
        if !self.options.background {
            return rule;
        }
        let EvictionRule { protected, scores, .. } = rule;
        EvictionRule {
            protected: Box::new(move |slots| {
                Ok(self.ends_beside_background(slots, protected(slots)?))
            }),
            scores: Box::new(move |view| {
                let background = view.track(TAKES)?.equal_scalar(TAKES_ANY);
                Ok(scores(view)?.mask_fill(background, f32::INFINITY))
            }),
            ..rule
        }
    }
}
