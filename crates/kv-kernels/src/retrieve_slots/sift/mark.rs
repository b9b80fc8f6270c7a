//! Slots whose scores are above the edges' bins, and those within them.

use cubecl::prelude::*;

use super::{BINS, CANDIDATES, EDGES, PART_WORDS, bin_of, highest};
use crate::retrieve_slots::choose::wanted_of;
use crate::retrieve_slots::decide::outset_of;
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::marks::{CHUNK, MARKS, WORD};
use crate::retrieve_slots::radix::{PLANES, exclusive};
use crate::retrieve_slots::table::{DECIDED, RETRIEVES};

/// Marks the slots of scores above the edges' bins, and hands on those within them.
///
/// # Shapes
/// As for [`count_kernel`](super::count::count_kernel); `marks` `[P, 3, words]`; `tallies` `[P, 2]`, `candidates`
/// `[P, 2, CANDIDATES, 2]`: ordered scores and their slots; `edges` `[P, EDGES]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn mark_kernel(
    lengths: &[i32],
    newest: &[i32],
    table: &[i32],
    ordered: &[u32],
    part_sums: &[f32],
    bins: &[Atomic<u32>],
    marks: &mut [u32],
    tallies: &[Atomic<u32>],
    candidates: &mut [u32],
    edges: &mut [u32],
    pairs: usize,
    kv_heads: usize,
    splits: usize,
    stride: usize,
    block: usize,
    hidden: u32,
    #[comptime] blueprint: Blueprint,
) {
    let units = blueprint.units.comptime();
    let each = comptime!(BINS.div_ceil(units));
    let unit = UNIT_POS as usize;
    let cube = CUBE_POS;
    if cube >= pairs * splits {
        terminate!();
    }
    let (pair, split) = (cube / splits, cube % splits);
    let outset =
        outset_of(table, pair, lengths[pair], newest[pair / kv_heads], block, hidden, blueprint);
    if table[outset.own + DECIDED] == i32::new(RETRIEVES as i64) {
        let sight = &outset.sight;
        let wanted = wanted_of(table, outset.own);
        let highest = highest(part_sums, pair, splits, blueprint);
        let mut counts = Array::<u32>::new(each);
        let mut own = 0u32;
        #[unroll]
        for b in 0..each {
            let bin = unit * each + b;
            counts[b] = 0u32;
            if bin < BINS {
                counts[b] = bins[pair * BINS + bin].load();
            }
            own += counts[b];
        }
        let mut parts = Shared::<[u32]>::new_slice(PLANES);
        // Of each search, the edge's bin and how many scores are in it.
        let mut found = Shared::<[u32]>::new_slice(4usize);
        let (before, _) = exclusive(own, &mut parts);
        let mut before = before;
        #[unroll]
        for b in 0..each {
            let after = before + counts[b];
            let bin = (unit * each + b) as u32;
            #[unroll]
            for search in 0..2usize {
                let most = if comptime!(search == 0) { wanted.top } else { wanted.fewer() };
                let most = u32::cast_from(most);
                if before < most && after >= most {
                    found[search] = bin;
                    found[2 + search] = counts[b];
                    if split == 0 {
                        edges[pair * EDGES + search] = before;
                        edges[pair * EDGES + 2 + search] = counts[b];
                    }
                }
            }
            before = after;
        }

        // A part of the words, whole ones.
        let words = sight.local.div_ceil(WORD);
        let share = words.div_ceil(splits);
        let first_word = min(split * share, words);
        let end_word = min(first_word + share, words);
        let marked = Shared::<[Atomic<u32>]>::new_slice(comptime!(2 * PART_WORDS));
        let mut word = unit;
        while word < comptime!(2 * PART_WORDS) {
            marked[word].store(0u32);
            word += units;
        }
        sync_cube();
        let end = min(end_word * WORD, sight.local);
        let mut i = max(first_word * WORD, sight.start) + unit;
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
                        if bin < found[search] {
                            let word = search * PART_WORDS + slot / WORD - first_word;
                            marked[word].fetch_or(1u32 << u32::cast_from(slot % WORD));
                        } else if bin == found[search]
                            && found[2 + search] <= comptime!(CANDIDATES as u32)
                        {
                            let at = tallies[2 * pair + search].fetch_add(1u32) as usize;
                            let to = 2 * ((2 * pair + search) * CANDIDATES + at);
                            candidates[to] = some[c];
                            candidates[to + 1] = slot as u32;
                        }
                    }
                }
            }
            i += CHUNK * units;
        }
        sync_cube();
        let all = stride.div_ceil(WORD);
        #[unroll]
        for search in 0..2usize {
            word = first_word + unit;
            while word < end_word {
                let bits = marked[search * PART_WORDS + word - first_word].load();
                marks[(pair * MARKS + search) * all + word] = bits;
                word += units;
            }
        }
    }
}
