//! The fourth kernel: finds the pivot bins, marks the slots above them, and collects candidates.

use cubecl::prelude::*;

use super::kernel_args::{DueRanges, PartScores, PivotCandidates, Room, ScoreCounts};
use super::pivot_bins::{ABOVE, BIN, FOUND, Searches, WITHIN, find_pivot_bins};
use super::tasks::{TO_RETRIEVE, run_of};
use super::{BINS, PART, PART_WORDS, PIVOT_WITHIN, PIVOTS, bin_of, top_of_bins};
use crate::cis::bitmask::{BITMASKS, WORD};
use crate::cis::blueprint::Blueprint;
use crate::cis::kernel_args::Selection;
use crate::cis::select_topk::load_topk_sizes;
use crate::cis::visible_range::load_step_context;

/// Sets the bits of slots whose scores are above the pivot bins, and collects the slots within the
/// pivot bins as candidates.
#[cube(launch_unchecked)]
pub(super) fn bitmask_kernel(
    due: &DueRanges,
    scored: &PartScores,
    counts: &ScoreCounts,
    selection: &mut Selection,
    within: &mut PivotCandidates,
    #[comptime] room: Room,
    #[comptime] blueprint: Blueprint,
) {
    let units = blueprint.units.comptime();
    let chunk = blueprint.chunk.comptime();
    let unit = UNIT_POS as usize;
    let (stride, scored_parts) = (scored.scores.stride, scored.parts);
    let parts = stride.div_ceil(PART);
    let all = stride.div_ceil(WORD);
    let mut ranges = Shared::<[u32]>::new_slice(room.ranges);
    let run = run_of(due, &mut ranges, parts, TO_RETRIEVE, blueprint);
    // For each pivot: its bin, how many scores are above the bin, and how many are in it.
    let mut found = Shared::<[u32]>::new_slice(comptime!(2 * FOUND));
    let marked = Shared::<[Atomic<u32>]>::new_slice(comptime!(2 * PART_WORDS));
    for item in run.first..run.end {
        let (range, part) = (item / parts, item % parts);
        let kv_head = ranges[range] as usize;
        let position = due.ranges.newest[kv_head / due.ranges.kv_heads];
        let length = due.ranges.lengths[kv_head];
        let context = load_step_context(&due.ranges, kv_head, length, position, blueprint);
        let visible = &context.visible;
        let top_of_bins = top_of_bins(&scored.part_sums, kv_head, scored_parts, blueprint);
        // All units have finished the previous part.
        sync_cube();
        if item == run.first || part == 0 {
            let wanted = load_topk_sizes(&due.ranges.table, context.own);
            let mut most = Array::<u32>::new(2usize);
            most[0] = wanted.k_top as u32;
            most[1] = wanted.k_dilate() as u32;
            let searches = comptime!(Searches { bins: BINS, count: 2, to: 0 });
            find_pivot_bins(&counts.bins, kv_head * BINS, &most, &mut found, searches, blueprint);
        }
        let mut word = unit;
        while word < comptime!(2 * PART_WORDS) {
            marked[word].store(0u32);
            word += units;
        }
        sync_cube();
        if part == 0 && UNIT_POS < 2 {
            within.pivots[kv_head * PIVOTS + unit] = found[unit * FOUND + ABOVE];
            within.pivots[kv_head * PIVOTS + PIVOT_WITHIN + unit] = found[unit * FOUND + WITHIN];
        }
        let end = min((part + 1) * PART, visible.local);
        let mut i = max(part * PART, visible.start) + unit;
        while i < end {
            let mut some = Array::<u32>::new(chunk);
            #[unroll]
            for c in 0..chunk {
                some[c] = scored.scores.ordered[kv_head * stride + min(i + c * units, end - 1)];
            }
            #[unroll]
            for c in 0..chunk {
                let slot = i + c * units;
                if slot < end {
                    let bin = bin_of(some[c], top_of_bins) as u32;
                    #[unroll]
                    for search in 0..2usize {
                        let pivot = comptime!(search * FOUND);
                        if bin < found[pivot + BIN] {
                            let word = search * PART_WORDS + slot % PART / WORD;
                            marked[word].fetch_or(1u32 << u32::cast_from(slot % WORD));
                        } else if bin == found[pivot + BIN]
                            && found[pivot + WITHIN] <= comptime!(room.candidates as u32)
                        {
                            let at = counts.tallies[2 * kv_head + search].fetch_add(1u32) as usize;
                            let to = 2 * ((2 * kv_head + search) * room.candidates + at);
                            within.candidates[to] = some[c];
                            within.candidates[to + 1] = slot as u32;
                        }
                    }
                }
            }
            i += chunk * units;
        }
        sync_cube();
        word = unit;
        while word < PART_WORDS {
            let to = part * PART_WORDS + word;
            if to < all {
                #[unroll]
                for search in 0..2usize {
                    let bits = marked[search * PART_WORDS + word].load();
                    selection.bitmasks[(kv_head * BITMASKS + search) * all + to] = bits;
                }
            }
            word += units;
        }
    }
}
