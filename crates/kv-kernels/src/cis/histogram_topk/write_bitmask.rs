//! The slots whose scores are above the pivot bins, and the candidates within these.

use cubecl::prelude::*;

use super::pivot_bins::{ABOVE, BIN, FOUND, WITHIN, find_pivot_bins};
use super::tasks::{RETRIEVES, run_of};
use super::{BINS, PART, PART_WORDS, PIVOT_WITHIN, PIVOTS, bin_of, top_of_bins};
use crate::cis::bitmask::{BITMASKS, CHUNK, WORD};
use crate::cis::blueprint::Blueprint;
use crate::cis::select_topk::load_topk_sizes;
use crate::cis::visible_range::load_step_context;

/// Sets the bits of slots whose scores are above the pivot bins, and hands on the candidates within
/// these.
///
/// # Shapes
/// As for [`histogram_kernel`](super::build_histogram::histogram_kernel); `bitmasks` `[P, 3,
/// words]`; `tallies` `[P, 2]`, `candidates` `[P, 2, room, 2]`: sort keys and their slots; `pivots`
/// `[P, PIVOTS]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn bitmask_kernel(
    lengths: &[i32],
    newest: &[i32],
    table: &[i32],
    tasks: &[u32],
    ordered: &[u32],
    part_sums: &[f32],
    bins: &[Atomic<u32>],
    bitmasks: &mut [u32],
    tallies: &[Atomic<u32>],
    candidates: &mut [u32],
    pivots: &mut [u32],
    total_kv_heads: usize,
    kv_heads: usize,
    scored_parts: usize,
    stride: usize,
    block: usize,
    hidden_share: u32,
    #[comptime] room: usize,
    #[comptime] most: usize,
    #[comptime] blueprint: Blueprint,
) {
    let units = blueprint.units.comptime();
    let unit = UNIT_POS as usize;
    let parts = stride.div_ceil(PART);
    let all = stride.div_ceil(WORD);
    let mut ranges = Shared::<[u32]>::new_slice(most);
    let run = run_of(tasks, &mut ranges, total_kv_heads, parts, RETRIEVES, blueprint);
    // Of each search, the pivot bin, and how many scores are above it and in it.
    let mut found = Shared::<[u32]>::new_slice(comptime!(2 * FOUND));
    let marked = Shared::<[Atomic<u32>]>::new_slice(comptime!(2 * PART_WORDS));
    for item in run.first..run.end {
        let (range, part) = (item / parts, item % parts);
        let kv_head = ranges[range] as usize;
        let position = newest[kv_head / kv_heads];
        let context = load_step_context(
            table,
            kv_head,
            lengths[kv_head],
            position,
            block,
            hidden_share,
            blueprint,
        );
        let visible = &context.visible;
        let top_of_bins = top_of_bins(part_sums, kv_head, scored_parts, blueprint);
        // All are through with those of before.
        sync_cube();
        if item == run.first || part == 0 {
            let wanted = load_topk_sizes(table, context.own);
            let mut most = Array::<u32>::new(2usize);
            most[0] = wanted.k_top as u32;
            most[1] = wanted.k_dilate() as u32;
            find_pivot_bins(
                bins,
                kv_head * BINS,
                BINS,
                &most,
                2usize,
                &mut found,
                0usize,
                blueprint,
            );
        }
        let mut word = unit;
        while word < comptime!(2 * PART_WORDS) {
            marked[word].store(0u32);
            word += units;
        }
        sync_cube();
        if part == 0 && UNIT_POS < 2 {
            pivots[kv_head * PIVOTS + unit] = found[unit * FOUND + ABOVE];
            pivots[kv_head * PIVOTS + PIVOT_WITHIN + unit] = found[unit * FOUND + WITHIN];
        }
        let end = min((part + 1) * PART, visible.local);
        let mut i = max(part * PART, visible.start) + unit;
        while i < end {
            let mut some = Array::<u32>::new(CHUNK);
            #[unroll]
            for c in 0..CHUNK {
                some[c] = ordered[kv_head * stride + min(i + c * units, end - 1)];
            }
            #[unroll]
            for c in 0..CHUNK {
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
                            && found[pivot + WITHIN] <= comptime!(room as u32)
                        {
                            let at = tallies[2 * kv_head + search].fetch_add(1u32) as usize;
                            let to = 2 * ((2 * kv_head + search) * room + at);
                            candidates[to] = some[c];
                            candidates[to + 1] = slot as u32;
                        }
                    }
                }
            }
            i += CHUNK * units;
        }
        sync_cube();
        word = unit;
        while word < PART_WORDS {
            let to = part * PART_WORDS + word;
            if to < all {
                #[unroll]
                for search in 0..2usize {
                    let bits = marked[search * PART_WORDS + word].load();
                    bitmasks[(kv_head * BITMASKS + search) * all + to] = bits;
                }
            }
            word += units;
        }
    }
}
