//! Makes probabilities of the scores that the attention kernels leave.

use cubecl::prelude::*;

use super::Features;
use super::slot_indexer::SlotIndexer;
use crate::components::softmax::weight_of;

/// Units of a cube.
pub(super) const UNITS: usize = 128;

/// Cubes share the ranges as the attention's do.
///
/// # Shapes
/// `log_sum_exp` `[B, Hkv, G]`, `scores` `[S, G]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn normalise_kernel(
    offsets: &[i32],
    lengths: &[i32],
    view: &[i32],
    log_sum_exp: &[f32],
    scores: &mut [f32],
    total_kv_heads: usize,
    splits: usize,
    slots: usize,
    width: usize,
    sinks: usize,
    #[comptime] group: usize,
    #[comptime] features: Features,
) {
    let kind = features.view.comptime();
    let cube = CUBE_POS;
    if cube >= total_kv_heads * splits {
        terminate!();
    }
    let kv_head = cube / splits;
    let indexer = SlotIndexer::new(view, offsets, lengths, kv_head, width, sinks, kind);
    let count = indexer.count;
    let mut i = cube % splits * UNITS + UNIT_POS as usize;
    while i < count {
        let slot = indexer.slot(view, i, slots, kind);
        if slot < slots {
            #[unroll]
            for g in 0..group {
                let at = slot * group + g;
                scores[at] = weight_of(scores[at], log_sum_exp[kv_head * group + g]);
            }
        }
        i += splits * UNITS;
    }
}
