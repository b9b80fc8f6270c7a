//! The last kernel: selects exactly among the candidates of the pivot bins, and finishes the steps
//! of ranges that retrieve.

use cubecl::prelude::*;

use super::kernel_args::{DueRanges, FinishBlueprint, PartScores, PivotCandidates};
use super::log_sums::logs_of;
use super::refine_bitmask::{RefinedRange, refine_bitmask};
use super::tasks::{TO_RETRIEVE, TO_SCORE, run_of};
use super::{PIVOT_WITHIN, PIVOTS, top_of_bins};
use crate::attention::decode::slot_indexer::SetView;
use crate::cis::bitmask::{BITMASKS, BitmaskPlace, WORD, within};
use crate::cis::compact_bitmask::{CompactedSet, ListOffsets, compact_bitmask};
use crate::cis::finish_step::{Totals, store_set, write_step};
use crate::cis::kernel_args::{ComparedVectors, Selection};
use crate::cis::select_topk::{load_topk_sizes, set_bitmask};
use crate::cis::table::*;
use crate::cis::visible_range::{StepContext, load_step_context};
use crate::components::sentinels::NEW_SET;

/// For each range that retrieves: selects the highest candidates, lists the set, and finishes the
/// step. Where ranges are measured, also writes the log-sum-exps of all scored ranges.
#[cube(launch_unchecked)]
pub(super) fn finish_kernel<F: Float>(
    due: &mut DueRanges,
    vectors: &mut ComparedVectors<F>,
    scored: &PartScores,
    selection: &mut Selection,
    pivot: &PivotCandidates,
    #[comptime] finish: FinishBlueprint,
    #[define(F)] _dtype: ElemType,
) {
    let FinishBlueprint { step: blueprint, words, gathers, .. } = finish;
    let (stride, scored_parts) = (scored.scores.stride, scored.parts);
    let radius = selection.radius;
    let group = blueprint.group.comptime();
    let (sets, width) = comptime!((blueprint.sets, blueprint.width));
    let mut ranges = Shared::<[u32]>::new_slice(finish.room.ranges);
    let mut near = Shared::<[u32]>::new_slice(comptime!(BITMASKS * words));
    let run = run_of(&*due, &mut ranges, 1usize, TO_SCORE, blueprint);
    for range in run.first..run.end {
        let kv_head = ranges[range] as usize;
        let asked = comptime!(blueprint.measures);
        let logs = logs_of(&scored.part_sums, kv_head, scored_parts, asked, blueprint);
        if comptime!(blueprint.measures) && UNIT_POS == 0 {
            #[unroll]
            for g in 0..group {
                selection.log_sum_exp[kv_head * group + g] = logs[g];
            }
        }
        if due.tasks[kv_head] & comptime!(TO_RETRIEVE) > 0 {
            let position = due.ranges.newest[kv_head / due.ranges.kv_heads];
            let length = due.ranges.lengths[kv_head];
            let context = load_step_context(&due.ranges, kv_head, length, position, blueprint);
            let (own, visible) = (context.own, &context.visible);
            let totals = Totals::of(&due.ranges.table, own);
            let wanted = load_topk_sizes(&due.ranges.table, own);
            let top_of_bins = top_of_bins(&scored.part_sums, kv_head, scored_parts, blueprint);
            // All units have finished the previous range.
            sync_cube();
            let within = max(
                pivot.pivots[kv_head * PIVOTS + PIVOT_WITHIN],
                pivot.pivots[kv_head * PIVOTS + PIVOT_WITHIN + 1],
            );
            let place = BitmaskPlace { marked: 0usize, words: words.runtime() };
            if within <= comptime!(finish.room.candidates as u32) {
                let range = RefinedRange { kv_head, stride, top_of_bins };
                let bitmasks = &selection.bitmasks;
                refine_bitmask(bitmasks, pivot, &range, &mut near, visible, &wanted, finish);
            } else {
                let (ordered, base) = (&scored.scores.ordered, kv_head * stride);
                set_bitmask(ordered, base, &mut near, &place, visible, &wanted, blueprint);
            }
            sync_cube();
            let set = min(context.held, comptime!(sets - 1));
            let first = comptime!(list(sets, width, 0)) + set * width;
            let choice = comptime!(list(sets, width, sets)).runtime();
            let lists = ListOffsets { set: own + first, choice: own + choice, radius };
            let table = &mut due.ranges.table;
            let listed =
                compact_bitmask(&mut near, &place, table, visible, &lists, gathers, blueprint);
            // All units have listed their tokens.
            sync_cube();
            store_set::<F>(
                &vectors.step,
                &mut vectors.cached,
                &mut due.ranges.table,
                &context,
                set,
                listed.count,
                blueprint,
            );
            if UNIT_POS == 0 {
                let mut chosen = set_view_of(&near, &context, first, &listed, radius, words);
                if comptime!(blueprint.reads_choice) {
                    chosen.first = choice;
                    chosen.count = listed.chosen;
                }
                let decided = i32::new(NEW_SET as i64);
                write_step(&mut due.ranges.table, own, visible, decided, &chosen, &totals);
            }
        }
    }
}

/// The view of a step that reads its new set. The set's last tokens may be neighbours that are
/// local slots; these are left out, as locals are read anyway.
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
