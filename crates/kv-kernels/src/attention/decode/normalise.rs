//! Turns logits into attention probabilities, `p = exp(logit − log-sum-exp)`, in place. A kernel of
//! its own does this, since the log-sum-exp is known only after all parts of a head are combined.

use cubecl::prelude::*;

use super::Features;
use super::kernel_args::AttendedRanges;
use crate::components::softmax::weight_of;

/// Units of a cube.
pub(super) const UNITS: usize = 128;

/// As in the attention kernel, `ranges.splits` cubes share a range.
///
/// # Shapes
/// `log_sum_exp` `[B, Hkv, G]`; `scores` `[slots, G]`, logits in, probabilities out.
#[cube(launch_unchecked)]
pub(super) fn normalise_kernel(
    ranges: &AttendedRanges,
    log_sum_exp: &[f32],
    scores: &mut [f32],
    slots: usize,
    #[comptime] group: usize,
    #[comptime] features: Features,
) {
    let kind = features.view.comptime();
    let cube = CUBE_POS;
    if cube >= ranges.total_kv_heads * ranges.splits {
        terminate!();
    }
    let kv_head = cube / ranges.splits;
    let indexer = ranges.indexer(kv_head, kind);
    let count = indexer.count;
    let mut i = cube % ranges.splits * UNITS + UNIT_POS as usize;
    while i < count {
        let slot = indexer.slot(&ranges.view, i, slots, kind);
        if slot < slots {
            #[unroll]
            for g in 0..group {
                let at = slot * group + g;
                scores[at] = weight_of(scores[at], log_sum_exp[kv_head * group + g]);
            }
        }
        i += ranges.splits * UNITS;
    }
}
