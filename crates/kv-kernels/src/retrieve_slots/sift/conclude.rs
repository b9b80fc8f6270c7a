//! The end of a long range's step: a set of what is marked, and of the highest of what is left to order.

use cubecl::prelude::*;

use super::edge::{ABOVE, BIN, FOUND, WITHIN, find_edges};
use super::queue::{self, SCORES, run_of};
use super::sums::logs_of;
use super::{CANDIDATES, EDGES, FINER, finer_bin_of, highest};
use crate::retrieve_slots::choose::{Wanted, mark_highest, wanted_of};
use crate::retrieve_slots::conclude::{Chosen, Totals, keep, write_step};
use crate::retrieve_slots::decide::{Outset, Sight, outset_of};
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::list::list_marked;
use crate::retrieve_slots::marks::{MARKS, WORD, within};
use crate::retrieve_slots::table::*;

/// Concludes the steps of ranges that retrieve: sets of what is marked and of the best candidates.
///
/// # Shapes
/// As for [`mark_kernel`](super::mark::mark_kernel); the longest range has so many `words` of marks, or fewer. Where
/// shared memory has room for a set's tokens, cubes gather them there.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn conclude_kernel<F: Float>(
    vectors: &[F],
    set_vectors: &mut [f32],
    lengths: &[i32],
    newest: &[i32],
    table: &mut [i32],
    tasks: &[u32],
    logits: &[f32],
    ordered: &[u32],
    part_sums: &[f32],
    marks: &[u32],
    candidates: &[u32],
    edges: &[u32],
    norms: &[f32],
    log_sum_exp: &mut [f32],
    pairs: usize,
    kv_heads: usize,
    scored_parts: usize,
    stride: usize,
    radius: usize,
    block: usize,
    hidden: u32,
    #[comptime] words: usize,
    #[comptime] gathers: bool,
    #[comptime] most: usize,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let (group, units) = comptime!((blueprint.group, blueprint.units));
    let (sets, width) = comptime!((blueprint.sets, blueprint.width));
    let mut ranges = Shared::<[u32]>::new_slice(most);
    let mut near = Shared::<[u32]>::new_slice(comptime!(MARKS * words));
    let run = run_of(tasks, &mut ranges, pairs, 1usize, SCORES, units);
    for range in run.first..run.end {
        let pair = ranges[range] as usize;
        let wanted = comptime!(blueprint.measures || blueprint.certified);
        let logs = logs_of(part_sums, pair, scored_parts, wanted, blueprint);
        if comptime!(blueprint.measures) && UNIT_POS == 0 {
            #[unroll]
            for g in 0..group {
                log_sum_exp[pair * group + g] = logs[g];
            }
        }
        if tasks[pair] & comptime!(queue::RETRIEVES) > 0 {
            let position = newest[pair / kv_heads];
            let outset =
                outset_of(&*table, pair, lengths[pair], position, block, hidden, blueprint);
            let (own, sight) = (outset.own, &outset.sight);
            let totals = Totals::of(&*table, own);
            let wanted = wanted_of(&*table, own);
            let highest = highest(part_sums, pair, scored_parts, blueprint);
            // All have read those of before.
            sync_cube();
            let within = max(edges[pair * EDGES + 2], edges[pair * EDGES + 3]);
            if within <= comptime!(CANDIDATES as u32) {
                mark_best(
                    marks, candidates, edges, pair, stride, &mut near, sight, &wanted, highest,
                    words, blueprint,
                );
            } else {
                let base = pair * stride;
                mark_highest(
                    ordered, base, &mut near, 0usize, words, sight, &wanted, blueprint,
                );
            }
            sync_cube();
            let set = min(outset.held, comptime!(sets - 1));
            let list = comptime!(FIELDS + sets * SET_FIELDS) + set * width;
            let (count, dropped) = list_marked(
                logits,
                &mut near,
                0usize,
                words,
                table,
                &logs,
                pair,
                stride,
                sight,
                own + list,
                radius,
                block,
                hidden,
                gathers,
                blueprint,
            );
            // All have listed their words.
            sync_cube();
            keep::<F>(
                vectors,
                set_vectors,
                norms,
                table,
                &outset,
                pair,
                set,
                count,
                dropped,
                scored_parts,
                blueprint,
            );
            if UNIT_POS == 0 {
                let fields = own + FIELDS + set * SET_FIELDS;
                table[own + OWN_KEY_NORM] = table[fields + KEY_NORM];
                table[own + OWN_DROPPED] = table[fields + DROPPED];
                let chosen = chosen_of(&near, &outset, list, count, radius, words);
                let decided = i32::new(RETRIEVES as i64);
                write_step(table, own, sight, decided, 0.0f32, &chosen, &totals);
            }
        }
    }
}

/// What a step reads of its new set: all but neighbours of the best that are locals, the last ones.
#[cube]
fn chosen_of(
    near: &Shared<[u32]>,
    outset: &Outset,
    first: usize,
    count: usize,
    radius: usize,
    #[comptime] words: usize,
) -> Chosen {
    let sight = &outset.sight;
    let reach = min(sight.local + radius, sight.length);
    let mut locals = 0u32;
    for word in sight.local / WORD..reach.div_ceil(WORD) {
        let bits = near[comptime!(2 * words) + word] & within(word, sight.local, reach);
        locals += bits.count_ones();
    }
    let count = count - min(locals as usize, count);
    Chosen { sinks: sight.sinks, first, count, local: sight.local, freed: sight.freed }
}

/// Marks what is above the edges' bins and the highest candidates, ties by the lowest slot: as many as are wanted in
/// all. Of candidates, too, those above the edge's part of its bin are in, and those within it are compared.
///
/// # Shapes
/// `near` `[3, words]`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn mark_best(
    marks: &[u32],
    candidates: &[u32],
    edges: &[u32],
    pair: usize,
    stride: usize,
    near: &mut Shared<[u32]>,
    sight: &Sight,
    wanted: &Wanted,
    highest: f32,
    #[comptime] words: usize,
    #[comptime] blueprint: Blueprint,
) {
    let units = blueprint.units.comptime();
    let unit = UNIT_POS as usize;
    let chosen = Shared::<[Atomic<u32>]>::new_slice(comptime!(2 * words));
    let all = stride.div_ceil(WORD);
    let marked = pair * MARKS * all;
    let known = sight.local.div_ceil(WORD);
    let mut word = unit;
    while word < known {
        #[unroll]
        for search in 0..2usize {
            chosen[search * words + word].store(marks[marked + search * all + word]);
        }
        word += units;
    }
    let histograms = Shared::<[Atomic<u32>]>::new_slice(comptime!(2 * FINER));
    let tied = Shared::<[Atomic<u32>]>::new_slice(2usize);
    let mut ties = Shared::<[u32]>::new_slice(comptime!(4 * CANDIDATES));
    let mut found = Shared::<[u32]>::new_slice(comptime!(2 * FOUND));
    let each = comptime!(CANDIDATES.div_ceil(units));
    let mut counts = Array::<usize>::new(2usize);
    let mut rooms = Array::<u32>::new(2usize);
    let mut keys = Array::<u32>::new(comptime!(2 * each));
    let mut slots = Array::<u32>::new(comptime!(2 * each));
    #[unroll]
    for search in 0..2usize {
        let most = if comptime!(search == 0) { wanted.top } else { wanted.fewer() };
        rooms[search] = most as u32 - edges[pair * EDGES + search];
        counts[search] = edges[pair * EDGES + 2 + search] as usize;
        #[unroll]
        for e in 0..each {
            let i = min(unit + e * units, counts[search] - 1);
            let from = 2 * ((2 * pair + search) * CANDIDATES + i);
            keys[search * each + e] = candidates[from];
            slots[search * each + e] = candidates[from + 1];
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
                let bin = finer_bin_of(keys[search * each + e], highest);
                histograms[search * FINER + bin].fetch_add(1u32);
            }
        }
    }
    sync_cube();
    #[unroll]
    for search in 0..2usize {
        let (base, to) = comptime!((search * FINER, search * FOUND));
        let mut most = Array::<u32>::new(1usize);
        most[0] = rooms[search];
        find_edges(&histograms[..], base, FINER, &most, 1usize, &mut found, to, units);
    }
    sync_cube();
    #[unroll]
    for search in 0..2usize {
        let edge = comptime!(search * FOUND);
        #[unroll]
        for e in 0..each {
            let (key, slot) = (keys[search * each + e], slots[search * each + e]);
            if unit + e * units < counts[search] {
                let bin = finer_bin_of(key, highest) as u32;
                if bin < found[edge + BIN] {
                    choose(&chosen, slot, comptime!(search * words));
                } else if bin == found[edge + BIN] {
                    let at = tied[search].fetch_add(1u32) as usize;
                    let to = 2 * (search * CANDIDATES + at);
                    ties[to] = key;
                    ties[to + 1] = slot;
                }
            }
        }
    }
    sync_cube();
    #[unroll]
    for search in 0..2usize {
        let edge = comptime!(search * FOUND);
        let from = comptime!(2 * search * CANDIDATES);
        let left = rooms[search] - found[edge + ABOVE];
        let within = found[edge + WITHIN] as usize;
        let mut i = unit;
        while i < within {
            let (key, slot) = (ties[from + 2 * i], ties[from + 2 * i + 1]);
            let mut rank = 0u32;
            for other in 0..within {
                let (others, at) = (ties[from + 2 * other], ties[from + 2 * other + 1]);
                rank += select(others > key || (others == key && at < slot), 1u32, 0u32);
            }
            if rank < left {
                choose(&chosen, slot, comptime!(search * words));
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

/// Marks a slot in the words from `first` on.
#[cube]
fn choose(chosen: &Shared<[Atomic<u32>]>, slot: u32, #[comptime] first: usize) {
    let bit = 1u32 << (slot % comptime!(WORD as u32));
    chosen[first + slot as usize / WORD].fetch_or(bit);
}
