//! The end of a long range's step, where it retrieves: a set of what is marked, and of the highest
//! of what is left to order.

use cubecl::prelude::*;

use super::best::mark_best;
use super::queue::{self, SCORES, run_of};
use super::sums::logs_of;
use super::{EDGE_WITHIN, EDGES, highest};
use crate::retrieve_slots::choose::{mark_highest, wanted_of};
use crate::retrieve_slots::conclude::{Chosen, Totals, keep, write_step};
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::list::{Listed, Lists, list_marked};
use crate::retrieve_slots::marks::{MARKS, WORD, within};
use crate::retrieve_slots::sight::{Outset, outset_of};
use crate::retrieve_slots::table::*;

/// Concludes the steps of ranges that retrieve, with sets of what is marked and of the best
/// candidates, and writes the log-sums of all that are scored where they are measured.
///
/// # Shapes
/// As for [`mark_kernel`](super::mark::mark_kernel); the longest range has so many `words` of
/// marks, or fewer. Where shared memory has room for a set's tokens, cubes gather them there.
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
    #[comptime] room: usize,
    #[comptime] gathers: bool,
    #[comptime] most: usize,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let group = blueprint.group.comptime();
    let (sets, width) = comptime!((blueprint.sets, blueprint.width));
    let mut ranges = Shared::<[u32]>::new_slice(most);
    let mut near = Shared::<[u32]>::new_slice(comptime!(MARKS * words));
    let run = run_of(tasks, &mut ranges, pairs, 1usize, SCORES, blueprint);
    for range in run.first..run.end {
        let pair = ranges[range] as usize;
        let asked = comptime!(blueprint.measures || blueprint.certified);
        let logs = logs_of(part_sums, pair, scored_parts, asked, blueprint);
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
            let within =
                max(edges[pair * EDGES + EDGE_WITHIN], edges[pair * EDGES + EDGE_WITHIN + 1]);
            if within <= comptime!(room as u32) {
                mark_best(
                    marks, candidates, edges, pair, stride, &mut near, sight, &wanted, highest,
                    words, room, blueprint,
                );
            } else {
                let base = pair * stride;
                mark_highest(ordered, base, &mut near, 0usize, words, sight, &wanted, blueprint);
            }
            sync_cube();
            let set = min(outset.held, comptime!(sets - 1));
            let first = comptime!(list(sets, width, 0)) + set * width;
            let choice = comptime!(list(sets, width, sets)).runtime();
            let lists = Lists { set: own + first, choice: own + choice };
            let listed = list_marked(
                logits, &mut near, 0usize, words, table, &logs, pair, stride, sight, &lists,
                radius, block, hidden, gathers, blueprint,
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
                listed.count,
                listed.dropped,
                scored_parts,
                blueprint,
            );
            if UNIT_POS == 0 {
                let fields = own + FIELDS + set * SET_FIELDS;
                table[own + OWN_KEY_NORM] = table[fields + KEY_NORM];
                table[own + OWN_DROPPED] = table[fields + DROPPED];
                let mut chosen = chosen_of(&near, &outset, first, &listed, radius, words);
                if comptime!(blueprint.reads_choice) {
                    chosen.first = choice;
                    chosen.count = listed.chosen;
                    table[own + OWN_DROPPED] = i32::reinterpret(listed.dropped_now);
                }
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
    listed: &Listed,
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
    let count = min(listed.count, listed.marked - locals as usize);
    Chosen { sinks: sight.sinks, first, count, local: sight.local, freed: sight.freed }
}
