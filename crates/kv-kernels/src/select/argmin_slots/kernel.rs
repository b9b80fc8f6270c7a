//! The kernel of `argmin_slots`, with one cube a range: units compare slots, and a tree reduces
//! their results.

use cubecl::prelude::*;

use crate::components::pool::HeadRanges;
use crate::components::sentinels::NO_SLOT;

/// Tokens that are chosen only where all slots are protected.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ProtectedTokens {
    /// Positions of the slots' tokens, `[S]`.
    positions: Box<[i32]>,
    /// Positions of the newest tokens, `[B]`.
    newest: Box<[i32]>,
    /// `Hkv`
    kv_heads: usize,
    /// First tokens that are protected.
    sinks: i32,
    /// Last tokens that are protected.
    recents: i32,
}

/// `scores` `[S]`, `output` `[B, Hkv]`. `protected` is read only where the kernel `protects`. A
/// cube's `units` must be a power of two.
#[cube(launch)]
pub(crate) fn argmin_slots_kernel(
    scores: &[f32],
    ranges: &HeadRanges,
    protected: &ProtectedTokens,
    output: &mut [i32],
    #[comptime] units: usize,
    #[comptime] protects: bool,
) {
    let kv_head = CUBE_POS;
    if kv_head >= ranges.total_kv_heads {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let start = ranges.offsets[kv_head] as usize;
    let length = ranges.lengths[kv_head] as usize;

    let mut lowest = Shared::<[f32]>::new_slice(units);
    let mut slots = Shared::<[i32]>::new_slice(units);
    let mut kept = Shared::<[u32]>::new_slice(units);

    let mut oldest = i32::new(0);
    if protects {
        oldest = protected.newest[kv_head / protected.kv_heads] - protected.recents;
    }
    // A unit's slots ascend, so `<` keeps the lowest of equal slots. `best_kept` is 0 for a slot
    // without protection.
    let mut best = 0.0f32;
    let mut best_kept = 0u32;
    let mut best_slot = i32::new(NO_SLOT as i64);
    let mut i = unit;
    while i < length {
        let score = scores[start + i];
        let mut is_kept = 0u32;
        if protects {
            let position = protected.positions[start + i];
            is_kept = u32::cast_from(position < protected.sinks || position > oldest);
        }
        let better = is_kept < best_kept || (is_kept == best_kept && score < best);
        if best_slot < 0 || better {
            best = score;
            best_kept = is_kept;
            best_slot = i32::cast_from(start + i);
        }
        i += units;
    }
    lowest[unit] = best;
    slots[unit] = best_slot;
    kept[unit] = best_kept;
    sync_cube();

    #[unroll]
    for level in 1..comptime!(units.ilog2() + 1) {
        let stride = comptime!(units >> level);
        if unit < stride {
            let other = slots[unit + stride];
            let (other_score, other_kept) = (lowest[unit + stride], kept[unit + stride]);
            let mine = slots[unit];
            let (my_score, my_kept) = (lowest[unit], kept[unit]);
            let lower = other_score < my_score || (other_score == my_score && other < mine);
            let better = other_kept < my_kept || (other_kept == my_kept && lower);
            if other >= 0 && (mine < 0 || better) {
                slots[unit] = other;
                lowest[unit] = other_score;
                kept[unit] = other_kept;
            }
        }
        sync_cube();
    }
    if unit == 0 {
        output[kv_head] = slots[0];
    }
}
