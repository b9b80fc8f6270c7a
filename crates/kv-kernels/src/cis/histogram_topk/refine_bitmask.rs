//! Selects exactly among the candidates of the pivot bins.

use cubecl::prelude::*;

use super::kernel_args::{FinishBlueprint, PivotCandidates};
use super::pivot_bins::{ABOVE, BIN, FOUND, Searches, WITHIN, find_pivot_bins};
use super::{FINER, PIVOT_WITHIN, PIVOTS, finer_bin_of};
use crate::cis::bitmask::{BITMASKS, WORD};
use crate::cis::select_topk::TopkSizes;
use crate::cis::visible_range::VisibleRange;

/// A range whose candidates are selected.
#[derive(CubeType, Clone, Copy)]
pub(super) struct RefinedRange {
    pub(super) kv_head: usize,
    /// Slots for which a range has room in the scratch buffers.
    pub(super) stride: usize,
    /// The score at which bins begin.
    pub(super) top_of_bins: f32,
}

/// Completes the bitmasks to the wanted numbers of slots. The bits of slots above the pivot bins
/// are set already; the highest candidates are added, ties by the lowest slot. Candidates are
/// counted by sub-bins. Candidates above the pivot's sub-bin are selected, and candidates within it
/// are compared with each other.
///
/// # Shapes
/// `bitmasks` `[P, 3, words of the stride]`, `near` `[3, words]`.
#[cube]
pub(super) fn refine_bitmask(
    bitmasks: &[u32],
    pivot: &PivotCandidates,
    range: &RefinedRange,
    near: &mut Shared<[u32]>,
    visible: &VisibleRange,
    wanted: &TopkSizes,
    #[comptime] finish: FinishBlueprint,
) {
    let (words, room) = comptime!((finish.words, finish.room.candidates));
    let blueprint = finish.step.comptime();
    let (kv_head, top_of_bins) = (range.kv_head, range.top_of_bins);
    let units = blueprint.units.comptime();
    let unit = UNIT_POS as usize;
    let chosen = Shared::<[Atomic<u32>]>::new_slice(comptime!(2 * words));
    let all = range.stride.div_ceil(WORD);
    let marked = kv_head * BITMASKS * all;
    let known = visible.local.div_ceil(WORD);
    let mut word = unit;
    while word < known {
        #[unroll]
        for search in 0..2usize {
            chosen[search * words + word].store(bitmasks[marked + search * all + word]);
        }
        word += units;
    }
    let histograms = Shared::<[Atomic<u32>]>::new_slice(comptime!(2 * FINER));
    let tied = Shared::<[Atomic<u32>]>::new_slice(2usize);
    let mut ties = Shared::<[u32]>::new_slice(comptime!(4 * room));
    let mut found = Shared::<[u32]>::new_slice(comptime!(2 * FOUND));
    let each = comptime!(room.div_ceil(units));
    let mut counts = Array::<usize>::new(2usize);
    let mut left = Array::<u32>::new(2usize);
    let mut keys = Array::<u32>::new(comptime!(2 * each));
    let mut slots = Array::<u32>::new(comptime!(2 * each));
    #[unroll]
    for search in 0..2usize {
        let most = if comptime!(search == 0) { wanted.k_top } else { wanted.k_dilate() };
        left[search] = most as u32 - pivot.pivots[kv_head * PIVOTS + search];
        counts[search] = pivot.pivots[kv_head * PIVOTS + PIVOT_WITHIN + search] as usize;
        #[unroll]
        for e in 0..each {
            let i = min(unit + e * units, counts[search] - 1);
            let from = 2 * ((2 * kv_head + search) * room + i);
            keys[search * each + e] = pivot.candidates[from];
            slots[search * each + e] = pivot.candidates[from + 1];
        }
    }
    let mut bin = unit;
    while bin < comptime!(2 * FINER) {
        histograms[bin].store(0u32);
        bin += units;
    }
    if unit < 2 {
        tied[unit].store(0u32);
    }
    sync_cube();
    #[unroll]
    for search in 0..2usize {
        #[unroll]
        for e in 0..each {
            if unit + e * units < counts[search] {
                let bin = finer_bin_of(keys[search * each + e], top_of_bins);
                histograms[search * FINER + bin].fetch_add(1u32);
            }
        }
    }
    sync_cube();
    #[unroll]
    for search in 0..2usize {
        let base = comptime!(search * FINER);
        let searches = comptime!(Searches { bins: FINER, count: 1, to: search * FOUND });
        let mut most = Array::<u32>::new(1usize);
        most[0] = left[search];
        find_pivot_bins(&histograms[..], base, &most, &mut found, searches, blueprint);
    }
    sync_cube();
    #[unroll]
    for search in 0..2usize {
        let pivot = comptime!(search * FOUND);
        #[unroll]
        for e in 0..each {
            let (key, slot) = (keys[search * each + e], slots[search * each + e]);
            if unit + e * units < counts[search] {
                let bin = finer_bin_of(key, top_of_bins) as u32;
                if bin < found[pivot + BIN] {
                    set_bit(&chosen, slot, comptime!(search * words));
                } else if bin == found[pivot + BIN] {
                    let at = tied[search].fetch_add(1u32) as usize;
                    let to = 2 * (search * room + at);
                    ties[to] = key;
                    ties[to + 1] = slot;
                }
            }
        }
    }
    sync_cube();
    #[unroll]
    for search in 0..2usize {
        let pivot = comptime!(search * FOUND);
        let from = comptime!(2 * search * room);
        let last = left[search] - found[pivot + ABOVE];
        let within = found[pivot + WITHIN] as usize;
        let mut i = unit;
        while i < within {
            let (key, slot) = (ties[from + 2 * i], ties[from + 2 * i + 1]);
            let mut rank = 0u32;
            for other in 0..within {
                let (others, at) = (ties[from + 2 * other], ties[from + 2 * other + 1]);
                rank += select(others > key || (others == key && at < slot), 1u32, 0u32);
            }
            if rank < last {
                set_bit(&chosen, slot, comptime!(search * words));
            }
            i += units;
        }
    }
    sync_cube();
    word = unit;
    while word < known {
        near[word] = chosen[word].load();
        near[words + word] = select(wanted.dilated > 0, chosen[words + word].load(), 0u32);
        word += units;
    }
}

/// Sets a slot's bit in the bitmask that begins at word `first`.
#[cube]
fn set_bit(chosen: &Shared<[Atomic<u32>]>, slot: u32, #[comptime] first: usize) {
    let bit = 1u32 << (slot % comptime!(WORD as u32));
    chosen[first + slot as usize / WORD].fetch_or(bit);
}
