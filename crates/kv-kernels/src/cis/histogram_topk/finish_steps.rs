//! The last kernel: selects among the candidates of the pivot bins, and finishes the steps of
//! ranges that retrieve.

use cubecl::prelude::*;

use super::log_sums::logs_of;
use super::refine_bitmask::refine_bitmask;
use super::tasks::{self, SCORES, run_of};
use super::{PIVOT_WITHIN, PIVOTS, top_of_bins};
use crate::attention::decode::slot_indexer::SetView;
use crate::cis::bitmask::{BITMASKS, BitmaskPlace, WORD, within};
use crate::cis::blueprint::Blueprint;
use crate::cis::compact_bitmask::{CompactedSet, ListOffsets, compact_bitmask};
use crate::cis::finish_step::{Totals, store_set, write_step};
use crate::cis::select_topk::{load_topk_sizes, set_bitmask};
use crate::cis::table::*;
use crate::cis::visible_range::{StepContext, load_step_context};

/// Lists the sets of ranges that retrieve, of the slots in the bitmasks and of the highest
/// candidates, finishes their steps, and writes the log-sums of all ranges that are scored where
/// they are measured.
///
/// # Shapes
/// As for [`bitmask_kernel`](super::write_bitmask::bitmask_kernel); the bitmask of the longest
/// range has `words` words, or fewer. Where shared memory has room for a set's tokens, cubes gather
/// them there.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn finish_kernel<F: Float>(
    vectors: &[F],
    set_vectors: &mut [f32],
    lengths: &[i32],
    newest: &[i32],
    table: &mut [i32],
    tasks: &[u32],
    ordered: &[u32],
    part_sums: &[f32],
    bitmasks: &[u32],
    candidates: &[u32],
    pivots: &[u32],
    log_sum_exp: &mut [f32],
    total_kv_heads: usize,
    kv_heads: usize,
    scored_parts: usize,
    stride: usize,
    radius: usize,
    block: usize,
    hidden_share: u32,
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
    let mut near = Shared::<[u32]>::new_slice(comptime!(BITMASKS * words));
    let run = run_of(tasks, &mut ranges, total_kv_heads, 1usize, SCORES, blueprint);
    for range in run.first..run.end {
        let kv_head = ranges[range] as usize;
        let asked = comptime!(blueprint.measures);
        let logs = logs_of(part_sums, kv_head, scored_parts, asked, blueprint);
        if comptime!(blueprint.measures) && UNIT_POS == 0 {
            #[unroll]
            for g in 0..group {
                log_sum_exp[kv_head * group + g] = logs[g];
            }
        }
        if tasks[kv_head] & comptime!(tasks::RETRIEVES) > 0 {
            let position = newest[kv_head / kv_heads];
            let context = load_step_context(
                &*table,
                kv_head,
                lengths[kv_head],
                position,
                block,
                hidden_share,
                blueprint,
            );
            let (own, visible) = (context.own, &context.visible);
            let totals = Totals::of(&*table, own);
            let wanted = load_topk_sizes(&*table, own);
            let top_of_bins = top_of_bins(part_sums, kv_head, scored_parts, blueprint);
            // All have read those of before.
            sync_cube();
            let within = max(
                pivots[kv_head * PIVOTS + PIVOT_WITHIN],
                pivots[kv_head * PIVOTS + PIVOT_WITHIN + 1],
            );
            let place = BitmaskPlace { marked: 0usize, words: words.runtime() };
            if within <= comptime!(room as u32) {
                refine_bitmask(
                    bitmasks,
                    candidates,
                    pivots,
                    kv_head,
                    stride,
                    &mut near,
                    visible,
                    &wanted,
                    top_of_bins,
                    words,
                    room,
                    blueprint,
                );
            } else {
                let base = kv_head * stride;
                set_bitmask(ordered, base, &mut near, &place, visible, &wanted, blueprint);
            }
            sync_cube();
            let set = min(context.held, comptime!(sets - 1));
            let first = comptime!(list(sets, width, 0)) + set * width;
            let choice = comptime!(list(sets, width, sets)).runtime();
            let lists = ListOffsets { set: own + first, choice: own + choice, radius };
            let listed =
                compact_bitmask(&mut near, &place, table, visible, &lists, gathers, blueprint);
            // All have listed their words.
            sync_cube();
            store_set::<F>(vectors, set_vectors, table, &context, set, listed.count, blueprint);
            if UNIT_POS == 0 {
                let mut chosen = set_view_of(&near, &context, first, &listed, radius, words);
                if comptime!(blueprint.reads_choice) {
                    chosen.first = choice;
                    chosen.count = listed.chosen;
                }
                let decided = i32::new(RETRIEVES as i64);
                write_step(table, own, visible, decided, &chosen, &totals);
            }
        }
    }
}

/// What a step reads of its new set: all but those neighbours that are local slots, which are the
/// last ones.
#[cube]
fn set_view_of(
    near: &Shared<[u32]>,
    context: &StepContext,
    first: usize,
    listed: &CompactedSet,
    radius: usize,
    #[comptime] words: usize,
) -> SetView {
    let visible = &context.visible;
    let reach = min(visible.local + radius, visible.length);
    let mut locals = 0u32;
    for word in visible.local / WORD..reach.div_ceil(WORD) {
        let bits = near[comptime!(2 * words) + word] & within(word, visible.local, reach);
        locals += bits.count_ones();
    }
    let count = min(listed.count, listed.marked - locals as usize);
    SetView { sinks: visible.sinks, first, count, local: visible.local, freed: visible.freed }
}
