//! Bounds on the attention's error by merged slots.

use burn::tensor::{DType, Tensor};
use kv_core::{LayerCache, read_f32};
use kv_kernels::GroupReduction;

use super::KeepKv;
use super::scores::{LOG_SAMPLES, LOG_SCORES};
use crate::policy::sentinels::LOG_OF_NO_SCORE;
use crate::{Attended, Result};

/// Track of `ln ŝ`, the score that a slot's merge predicted; [`LOG_OF_NO_SCORE`] for slots without
/// merges.
pub(super) const MERGED_FOR: &str = "merged-for";

/// The most that a slot can add, as a factor of its share of the attention times `γ`. It caps
/// theorem 5's bound, which is infinite for large errors.
const MOST: f64 = 2.0;

/// The perturbation of one group's output at a later step (theorem 5): below
/// `2ε(1 + ε)γ / (1 − ε)²` where all scores of the group were predicted with `|1 − ŝ/s| ≤ ε < 1`,
/// and values differ by at most `γ` from the group's values. Infinite from `ε = 1` on.
pub fn perturbation_bound(epsilon: f64, gamma: f64) -> f64 {
    if epsilon >= 1.0 {
        return f64::INFINITY;
    }
    2.0 * epsilon * (1.0 + epsilon) * gamma / (1.0 - epsilon).powi(2)
}

impl KeepKv {
    /// Writes the predicted score of each slot that a merge has changed: its weight differs from
    /// `before`, `[S]`.
    pub(super) fn remember_merges(
        &self,
        cache: &mut LayerCache,
        before: Option<Tensor<1>>,
    ) -> Result<()> {
        let (Some(before), Some(weights)) = (before, cache.log_weights()) else { return Ok(()) };
        let same = weights.clone().equal(before);
        let track = |name| cache.track(name).cloned();
        let (Some(scores), Some(samples)) = (track(LOG_SCORES), track(LOG_SAMPLES)) else {
            return Ok(());
        };
        let so_far = track(MERGED_FOR).unwrap_or_else(|| scores.full_like(LOG_OF_NO_SCORE));
        let merged_for = (scores - samples).mask_where(same, so_far);
        Ok(cache.set_track(MERGED_FOR, merged_for, LOG_OF_NO_SCORE)?)
    }

    /// A copy of the weights, where merges are to be remembered.
    pub(super) fn weights_before(&self, cache: &LayerCache) -> Option<Tensor<1>> {
        let remembers = self.options.rebuild_above > 0.0;
        // A copy: merges write in place.
        cache.log_weights().filter(|_| remembers).map(|weights| weights.clone().mul_scalar(1.0))
    }

    /// An estimate of the perturbation of a step's output, of the head where it is largest, in
    /// units of its largest value's norm. Waits for the device.
    ///
    /// Every merged slot adds theorem 5's bound times its share of the attention (equation 32
    /// before its last step). `ε` is the relative difference of the slot's score from the score
    /// that its merge predicted, since the scores of its tokens are no longer known. `γ` is twice
    /// the largest norm.
    pub(super) fn estimated_perturbation(
        &self,
        cache: &LayerCache,
        attended: &Attended<'_>,
    ) -> Result<f64> {
        let Some(merged_for) = cache.track(MERGED_FOR) else { return Ok(0.0) };
        let (logits, total) = (attended.logits.clone(), attended.log_sum_exp.clone());
        let shares = cache.probabilities(logits.clone(), total, GroupReduction::Mean)?;
        let scores = super::scores::log_mean(logits, 1).squeeze_dim::<1>(1);
        let scores = match cache.log_weights() {
            Some(weights) => scores - weights.clone(),
            None => scores,
        };
        let [shares, scores, merged_for] = [shares, scores, merged_for.clone()]
            .map(|values| read_f32("scores", values.cast(DType::F32)));
        let (shares, scores, merged_for) = (shares?, scores?, merged_for?);
        let layout = cache.layout();
        let heads = (0..layout.head_ranges()).map(|range| {
            let merged = layout.live(range).filter(|&slot| merged_for[slot] > LOG_OF_NO_SCORE);
            let parts = merged.map(|slot| {
                let epsilon = (f64::from(merged_for[slot]) - f64::from(scores[slot])).exp_m1();
                f64::from(shares[slot]) * perturbation_bound(epsilon.abs(), 1.0).min(MOST)
            });
            2.0 * parts.sum::<f64>()
        });
        Ok(heads.fold(0.0, f64::max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_that_of_theorem_5() {
        assert_eq!(perturbation_bound(0.0, 3.0), 0.0);
        assert!((perturbation_bound(0.5, 2.0) - 2.0 * 0.5 * 1.5 * 2.0 / 0.25).abs() < 1e-12);
        assert_eq!(perturbation_bound(1.0, 1.0), f64::INFINITY);
    }
}
