//! The end of a long range's step: a set of what is marked, and of the highest of what is left to order.

use cubecl::prelude::*;

use super::sums::logs_of;
use super::{CANDIDATES, EDGES};
use crate::retrieve_slots::choose::{Wanted, mark_highest, settle, wanted_of};
use crate::retrieve_slots::conclude::{conclude, keep};
use crate::retrieve_slots::decide::{Sight, outset_of};
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::list::list_marked;
use crate::retrieve_slots::marks::{MARKS, WORD, own_words};
use crate::retrieve_slots::table::*;

/// Concludes a range's step, a cube a range: a set of what is marked and of the best candidates.
///
/// # Shapes
/// As for [`mark_kernel`](super::mark::mark_kernel); so many `words` of marks has the longest range, or more.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn conclude_kernel<F: Float>(
    vectors: &[F],
    set_vectors: &mut [f32],
    lengths: &[i32],
    newest: &[i32],
    table: &mut [i32],
    logits: &[f32],
    ordered: &[u32],
    part_sums: &[f32],
    marks: &mut [u32],
    candidates: &[u32],
    edges: &[u32],
    norms: &[f32],
    log_sum_exp: &mut [f32],
    pairs: usize,
    kv_heads: usize,
    splits: usize,
    stride: usize,
    radius: usize,
    block: usize,
    hidden: u32,
    #[comptime] words: usize,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let (group, units) = comptime!((blueprint.group, blueprint.units));
    let (sets, width) = comptime!((blueprint.sets, blueprint.width));
    let pair = CUBE_POS;
    if pair >= pairs {
        terminate!();
    }
    let position = newest[pair / kv_heads];
    let outset = outset_of(&*table, pair, lengths[pair], position, block, hidden, blueprint);
    let (own, sight) = (outset.own, &outset.sight);
    let decided = table[own + DECIDED];
    let distance = f32::reinterpret(table[own + DISTANCE]);
    let retrieves = decided == i32::new(RETRIEVES as i64);
    let mut set = 0usize;
    if decided > 0 {
        set = decided as usize;
    }
    if comptime!(blueprint.measures) || retrieves {
        let wanted = comptime!(blueprint.measures || blueprint.certified);
        let logs = logs_of(part_sums, pair, splits, wanted, blueprint);
        if comptime!(blueprint.measures) && UNIT_POS == 0 {
            #[unroll]
            for g in 0..group {
                log_sum_exp[pair * group + g] = logs[g];
            }
        }
        if retrieves {
            set = min(outset.held, comptime!(sets - 1));
            let wanted = wanted_of(&*table, own);
            let marked = pair * MARKS * stride.div_ceil(WORD);
            let most = max(edges[pair * EDGES + 2], edges[pair * EDGES + 3]);
            if most <= comptime!(CANDIDATES as u32) {
                mark_best(
                    marks, marked, candidates, edges, pair, stride, sight, &wanted, words, units,
                );
            } else {
                let base = pair * stride;
                mark_highest(ordered, base, marks, marked, stride, sight, &wanted, blueprint);
            }
            settle(blueprint.fenced);
            let to = own + comptime!(FIELDS + sets * SET_FIELDS) + set * width;
            let (count, dropped) = list_marked(
                logits, marks, marked, table, &logs, pair, stride, sight, to, radius, block,
                hidden, blueprint,
            );
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
                splits,
                blueprint,
            );
            settle(blueprint.fenced);
        }
    }
    conclude(table, own, sight, decided, set, distance, units, sets, width);
}

/// Adds the highest candidates to the marks, ties by the lowest slot: as many as are wanted beside what is above.
#[cube]
#[allow(clippy::too_many_arguments)]
fn mark_best(
    marks: &mut [u32],
    marked: usize,
    candidates: &[u32],
    edges: &[u32],
    pair: usize,
    stride: usize,
    sight: &Sight,
    wanted: &Wanted,
    #[comptime] words: usize,
    #[comptime] units: usize,
) {
    let unit = UNIT_POS as usize;
    let chosen = Shared::<[Atomic<u32>]>::new_slice(comptime!(2 * words));
    let mut keys = Shared::<[u32]>::new_slice(CANDIDATES);
    let mut slots = Shared::<[u32]>::new_slice(CANDIDATES);
    let mut word = unit;
    while word < comptime!(2 * words) {
        chosen[word].store(0u32);
        word += units;
    }
    #[unroll]
    for search in 0..2usize {
        let above = edges[pair * EDGES + search];
        let count = edges[pair * EDGES + 2 + search] as usize;
        let most = if comptime!(search == 0) { wanted.top } else { wanted.fewer() };
        let room = u32::cast_from(most) - above;
        // All have read those of the search before.
        sync_cube();
        let mut i = unit;
        while i < count {
            let from = 2 * ((2 * pair + search) * CANDIDATES + i);
            keys[i] = candidates[from];
            slots[i] = candidates[from + 1];
            i += units;
        }
        sync_cube();
        i = unit;
        while i < count {
            let (key, slot) = (keys[i], slots[i]);
            let mut rank = 0u32;
            for other in 0..count {
                let ahead = keys[other] > key || (keys[other] == key && slots[other] < slot);
                rank += select(ahead, 1u32, 0u32);
            }
            if rank < room {
                let word = search * words + slot as usize / WORD;
                chosen[word].fetch_or(1u32 << (slot % comptime!(WORD as u32)));
            }
            i += units;
        }
    }
    sync_cube();
    let all = stride.div_ceil(WORD);
    let (first, last) = own_words(sight.local, units);
    for word in first..last {
        marks[marked + word] |= chosen[word].load();
        let best = marks[marked + all + word] | chosen[words + word].load();
        marks[marked + all + word] = select(wanted.dilated > 0, best, 0u32);
    }
}
