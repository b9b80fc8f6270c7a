//! The kernel of `average_scores`, with one unit a slot.

use cubecl::prelude::*;

use crate::components::sentinels::LOG_OF_ZERO;
use crate::components::softmax::larger;

/// Logarithms of the factors of the new score and of the sum so far.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct ScoreWeights {
    pub(crate) new: f32,
    pub(crate) old: f32,
}

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Query heads of a slot.
    pub(crate) group: usize,
    /// Whether slots have weights.
    pub(crate) weighted: bool,
}

#[cube(launch)]
pub(crate) fn average_scores_kernel(
    sums: &mut [f32],
    samples: &mut [f32],
    logits: &[f32],
    log_weights: &[f32],
    slots: usize,
    weights: ScoreWeights,
    #[comptime] blueprint: Blueprint,
) {
    let slot = ABSOLUTE_POS;
    if slot >= slots {
        terminate!();
    }
    let (sum, count) = averaged(&*sums, &*samples, logits, log_weights, slot, &weights, blueprint);
    sums[slot] = sum;
    samples[slot] = count;
}

/// A slot's sum and sum of weights after the new score is added.
#[cube]
pub(crate) fn averaged(
    sums: &[f32],
    samples: &[f32],
    logits: &[f32],
    log_weights: &[f32],
    slot: usize,
    weights: &ScoreWeights,
    #[comptime] blueprint: Blueprint,
) -> (f32, f32) {
    let group = blueprint.group.comptime();
    // `NaN < x` is false, so that NaN stays.
    let first = logits[slot * group];
    let mut score = select(first < f32::new(LOG_OF_ZERO), f32::new(LOG_OF_ZERO), first);
    if comptime!(group > 1) {
        let mut top = larger(f32::new(LOG_OF_ZERO), first);
        #[unroll]
        for g in 1..group {
            top = larger(top, logits[slot * group + g]);
        }
        let mut sum = 0.0f32;
        #[unroll]
        for g in 0..group {
            sum += (logits[slot * group + g] - top).exp();
        }
        score = top + (sum / f32::cast_from(group.runtime())).ln();
    }
    if comptime!(blueprint.weighted) {
        score -= log_weights[slot];
    }
    let (new, old) = (weights.new, weights.old);
    (log_add(sums[slot] + old, score + new), log_add(samples[slot] + old, new))
}

/// `ln(exp(a) + exp(b))`
#[cube]
pub(crate) fn log_add(a: f32, b: f32) -> f32 {
    let top = larger(a, b);
    top + (1.0f32 + (-(a - b).abs()).exp()).ln()
}
