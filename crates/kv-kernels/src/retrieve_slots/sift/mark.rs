//! Slots whose scores are above the edges' bins, and those within them.

use cubecl::prelude::*;

use super::edge::{ABOVE, BIN, FOUND, WITHIN, find_edges};
use super::queue::{RETRIEVES, run_of};
use super::{BINS, EDGE_WITHIN, EDGES, PART, PART_WORDS, bin_of, highest};
use crate::retrieve_slots::choose::wanted_of;
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::marks::{CHUNK, MARKS, WORD};
use crate::retrieve_slots::sight::outset_of;

/// Marks the slots of scores above the edges' bins, and hands on those within them.
///
/// # Shapes
/// As for [`count_kernel`](super::count::count_kernel); `marks` `[P, 3, words]`; `tallies` `[P,
/// 2]`, `candidates` `[P, 2, room, 2]`: ordered scores and their slots; `edges` `[P, EDGES]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn mark_kernel(
    lengths: &[i32],
    newest: &[i32],
    table: &[i32],
    tasks: &[u32],
    ordered: &[u32],
    part_sums: &[f32],
    bins: &[Atomic<u32>],
    marks: &mut [u32],
    tallies: &[Atomic<u32>],
    candidates: &mut [u32],
    edges: &mut [u32],
    pairs: usize,
    kv_heads: usize,
    scored_parts: usize,
    stride: usize,
    block: usize,
    hidden: u32,
    #[comptime] room: usize,
    #[comptime] most: usize,
    #[comptime] blueprint: Blueprint,
) {
    let units = blueprint.units.comptime();
    let unit = UNIT_POS as usize;
    let parts = stride.div_ceil(PART);
    let all = stride.div_ceil(WORD);
    let mut ranges = Shared::<[u32]>::new_slice(most);
    let run = run_of(tasks, &mut ranges, pairs, parts, RETRIEVES, blueprint);
    // Of each search, the edge's bin and how many scores are above it and in it.
    let mut found = Shared::<[u32]>::new_slice(comptime!(2 * FOUND));
    let marked = Shared::<[Atomic<u32>]>::new_slice(comptime!(2 * PART_WORDS));
    for item in run.first..run.end {
        let (range, part) = (item / parts, item % parts);
        let pair = ranges[range] as usize;
        let position = newest[pair / kv_heads];
        let outset = outset_of(table, pair, lengths[pair], position, block, hidden, blueprint);
        let sight = &outset.sight;
        let highest = highest(part_sums, pair, scored_parts, blueprint);
        // All are through with those of before.
        sync_cube();
        if item == run.first || part == 0 {
            let wanted = wanted_of(table, outset.own);
            let mut most = Array::<u32>::new(2usize);
            most[0] = wanted.top as u32;
            most[1] = wanted.fewer() as u32;
            find_edges(bins, pair * BINS, BINS, &most, 2usize, &mut found, 0usize, blueprint);
        }
        let mut word = unit;
        while word < comptime!(2 * PART_WORDS) {
            marked[word].store(0u32);
            word += units;
        }
        sync_cube();
        if part == 0 && UNIT_POS < 2 {
            edges[pair * EDGES + unit] = found[unit * FOUND + ABOVE];
            edges[pair * EDGES + EDGE_WITHIN + unit] = found[unit * FOUND + WITHIN];
        }
        let end = min((part + 1) * PART, sight.local);
        let mut i = max(part * PART, sight.start) + unit;
        while i < end {
            let mut some = Array::<u32>::new(CHUNK);
            #[unroll]
            for c in 0..CHUNK {
                some[c] = ordered[pair * stride + min(i + c * units, end - 1)];
            }
            #[unroll]
            for c in 0..CHUNK {
                let slot = i + c * units;
                if slot < end {
                    let bin = bin_of(some[c], highest) as u32;
                    #[unroll]
                    for search in 0..2usize {
                        let edge = comptime!(search * FOUND);
                        if bin < found[edge + BIN] {
                            let word = search * PART_WORDS + slot % PART / WORD;
                            marked[word].fetch_or(1u32 << u32::cast_from(slot % WORD));
                        } else if bin == found[edge + BIN]
                            && found[edge + WITHIN] <= comptime!(room as u32)
                        {
                            let at = tallies[2 * pair + search].fetch_add(1u32) as usize;
                            let to = 2 * ((2 * pair + search) * room + at);
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
                    marks[(pair * MARKS + search) * all + to] = bits;
                }
            }
            word += units;
        }
    }
}
