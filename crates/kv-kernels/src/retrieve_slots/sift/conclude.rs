//! The end of a long range's step: a set of what is marked, and of the highest of what is left to order.

use cubecl::prelude::*;

use super::sums::logs_of;
use super::{CANDIDATES, EDGES};
use crate::retrieve_slots::choose::{Wanted, mark_highest, settle, wanted_of};
use crate::retrieve_slots::conclude::{conclude, keep};
use crate::retrieve_slots::decide::{Sight, outset_of};
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::list::list_marked;
use crate::retrieve_slots::marks::{MARKS, WORD};
use crate::retrieve_slots::table::*;

/// Concludes a range's step, a cube a range: a set of what is marked and of the best candidates.
///
/// # Shapes
/// As for [`mark_kernel`](super::mark::mark_kernel); the longest range has so many `words` of marks, or fewer.
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
        let logs = logs_of(part_sums, pair, scored_parts, wanted, blueprint);
        if comptime!(blueprint.measures) && UNIT_POS == 0 {
            #[unroll]
            for g in 0..group {
                log_sum_exp[pair * group + g] = logs[g];
            }
        }
        if retrieves {
            set = min(outset.held, comptime!(sets - 1));
            let wanted = wanted_of(&*table, own);
            let mut near = Shared::<[u32]>::new_slice(comptime!(MARKS * words));
            let most = max(edges[pair * EDGES + 2], edges[pair * EDGES + 3]);
            if most <= comptime!(CANDIDATES as u32) {
                mark_best(
                    marks, candidates, edges, pair, stride, &mut near, sight, &wanted, words, units,
                );
            } else {
                let base = pair * stride;
                mark_highest(
                    ordered,
                    base,
                    &mut near,
                    0usize,
                    words,
                    sight,
                    &wanted,
                    blueprint,
                );
            }
            sync_cube();
            let to = own + comptime!(FIELDS + sets * SET_FIELDS) + set * width;
            let (count, dropped) = list_marked(
                logits, &mut near, 0usize, words, table, &logs, pair, stride, sight, to, radius,
                block, hidden, blueprint,
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
                scored_parts,
                blueprint,
            );
            settle(blueprint.fenced);
        }
    }
    conclude(table, own, sight, decided, set, distance, units, sets, width);
}

/// Marks what is above the edges' bins and the highest candidates, ties by the lowest slot: as many as are wanted in
/// all.
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
    #[comptime] words: usize,
    #[comptime] units: usize,
) {
    let unit = UNIT_POS as usize;
    let chosen = Shared::<[Atomic<u32>]>::new_slice(comptime!(2 * words));
    let mut keys = Shared::<[u32]>::new_slice(comptime!(2 * CANDIDATES));
    let mut slots = Shared::<[u32]>::new_slice(comptime!(2 * CANDIDATES));
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
    #[unroll]
    for search in 0..2usize {
        let count = edges[pair * EDGES + 2 + search] as usize;
        let mut i = unit;
        while i < count {
            let from = 2 * ((2 * pair + search) * CANDIDATES + i);
            keys[search * CANDIDATES + i] = candidates[from];
            slots[search * CANDIDATES + i] = candidates[from + 1];
            i += units;
        }
    }
    sync_cube();
    #[unroll]
    for search in 0..2usize {
        let above = edges[pair * EDGES + search];
        let count = edges[pair * EDGES + 2 + search] as usize;
        let most = if comptime!(search == 0) { wanted.top } else { wanted.fewer() };
        let room = u32::cast_from(most) - above;
        let from = comptime!(search * CANDIDATES);
        let mut i = unit;
        while i < count {
            let (key, slot) = (keys[from + i], slots[from + i]);
            let mut rank = 0u32;
            for other in from..from + count {
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
    word = unit;
    while word < known {
        near[word] = chosen[word].load();
        near[words + word] = select(wanted.dilated > 0, chosen[words + word].load(), 0u32);
        word += units;
    }
}
