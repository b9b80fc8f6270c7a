//! The CubeCL kernel: a unit a slot.

use cubecl::prelude::*;

use crate::components::sentinels::LOG_OF_ZERO;
use crate::components::softmax::larger;

#[cube(launch)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn average_scores_kernel(
    sums: &mut [f32],
    samples: &mut [f32],
    logits: &[f32],
    log_weights: &[f32],
    slots: usize,
    new: f32,
    old: f32,
    #[comptime] group: usize,
    #[comptime] weighted: bool,
) {
    let slot = ABSOLUTE_POS;
    if slot >= slots {
        terminate!();
    }
    let (sum, count) =
        averaged(&*sums, &*samples, logits, log_weights, slot, new, old, group, weighted);
    sums[slot] = sum;
    samples[slot] = count;
}

/// A slot's sum and samples with its scores in them.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn averaged(
    sums: &[f32],
    samples: &[f32],
    logits: &[f32],
    log_weights: &[f32],
    slot: usize,
    new: f32,
    old: f32,
    #[comptime] group: usize,
    #[comptime] weighted: bool,
) -> (f32, f32) {
    // NaN is no smaller than anything: it stays.
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
    if weighted {
        score -= log_weights[slot];
    }
    (log_add(sums[slot] + old, score + new), log_add(samples[slot] + old, new))
}

/// `ln(exp(a) + exp(b))`
#[cube]
pub(crate) fn log_add(a: f32, b: f32) -> f32 {
    let top = larger(a, b);
    top + (1.0f32 + (-(a - b).abs()).exp()).ln()
}
