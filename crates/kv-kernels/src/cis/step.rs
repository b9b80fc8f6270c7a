//! The whole step of one range in one cube: selection, the set's list and the end of the step. The
//! cube scores the range itself, or reads scores that `score.rs` has written. It serves short
//! ranges; `histogram_topk/` serves long ones.

use cubecl::prelude::*;

use super::bitmask::{BITMASKS, BitmaskPlace, WORD};
use super::blueprint::Blueprint;
use super::compact_bitmask::ListOffsets;
use super::finish_step::{finish_step, store_set, store_shared_set};
use super::kernel_args::Choosing;
use super::log_sums::{Sums, log_sums};
use super::match_cached_set::{Decision, load_similarity_partials, match_cached_set};
use super::score::{ScoreShare, score_split};
use super::select_topk::{LogitRows, TopkSearch, load_topk_sizes, select_topk};
use super::table::*;
use super::visible_range::load_step_context;
use crate::attention::decode::slot_indexer::SetView;
use crate::components::barrier::sync_memory;
use crate::components::sentinels::NEW_SET;

/// Runs the step of each range in one cube.
#[cube(launch_unchecked)]
pub(super) fn retrieve_kernel<F: Float, N: Size>(
    choosing: &mut Choosing<F, N>,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let kv_head = CUBE_POS;
    if kv_head >= choosing.ranges.total_kv_heads {
        terminate!();
    }
    step::<F, N>(choosing, kv_head, blueprint);
}

/// Runs a range's step in a cube, and returns the view of the slots that it reads.
#[cube]
pub(crate) fn step<F: Float, N: Size>(
    choosing: &mut Choosing<F, N>,
    kv_head: usize,
    #[comptime] blueprint: Blueprint,
) -> SetView {
    let group = blueprint.group.comptime();
    let units = blueprint.units.comptime();
    let sets = blueprint.sets.comptime();
    let width = blueprint.width.comptime();
    let direct = comptime!(blueprint.direct());
    let staged = blueprint.staged.comptime();
    let chunk = blueprint.chunk.comptime();
    let unit = UNIT_POS as usize;
    let (stride, radius) = (choosing.scores.stride, choosing.selection.radius);
    let length = choosing.ranges.lengths[kv_head];
    let position = choosing.ranges.newest[kv_head / choosing.ranges.kv_heads];
    let context = load_step_context(&choosing.ranges, kv_head, length, position, blueprint);
    let own = context.own;
    let visible = &context.visible;
    let wanted = load_topk_sizes(&choosing.ranges.table, own);
    let mut decided = choosing.ranges.table[own + DECIDED];
    let mut near = Shared::<[u32]>::new_slice(comptime!(staged.max(1)));
    let mut near_bitmasks =
        Shared::<[u32]>::new_slice(comptime!(BITMASKS * staged.div_ceil(WORD).max(1)));
    let words = stride.div_ceil(WORD);
    let marked = kv_head * BITMASKS * words;
    let all = comptime!(blueprint.measures);
    if comptime!(blueprint.scores) {
        let first = load_similarity_partials::<F>(
            &choosing.vectors.step,
            &choosing.vectors.cached,
            &choosing.ranges.table,
            kv_head,
            blueprint,
        );
        let decision = match_cached_set::<F>(
            &first,
            &choosing.vectors.step,
            &choosing.vectors.cached,
            &choosing.ranges.table,
            &context,
            blueprint,
        );
        decided = decision.decided;
        if all || decided == i32::new(NEW_SET as i64) {
            let (scores, scores_at) = if comptime!(staged > 0) {
                (&mut near[..], 0usize)
            } else {
                (&mut choosing.scores.ordered[..], kv_head * stride)
            };
            let mut none = Sums::none(comptime!(blueprint.held()));
            let share = ScoreShare {
                kv_head,
                offset: choosing.ranges.offsets[kv_head] as usize,
                split: 0usize,
                splits: 1usize,
                base: scores_at,
                stride,
            };
            score_split::<F, N>(
                &choosing.keys,
                &mut choosing.scores.logits,
                scores,
                &mut none,
                &share,
                visible,
                blueprint,
            );
        }
    }
    let retrieves = decided == i32::new(NEW_SET as i64);
    if comptime!(blueprint.chains && blueprint.shares && !blueprint.scores) {
        // All units have read the range's fields. (Where vectors are compared, that has a barrier.)
        sync_cube();
    }
    store_shared_set::<F>(
        &choosing.vectors.step,
        &mut choosing.vectors.cached,
        &mut choosing.ranges.table,
        &context,
        decided,
        blueprint,
    );
    let mut choice = 0usize;
    let mut set = 0usize;
    if decided > 0 {
        set = decided as usize;
    }
    if all || retrieves {
        sync_memory(blueprint.fenced);
        let base = kv_head * group * stride;
        let mut sums = Array::<f32>::new(group);
        #[unroll]
        for g in 0..group {
            sums[g] = 0.0f32;
        }
        if comptime!(blueprint.measures || group > 1) {
            let own = log_sums(&choosing.scores.logits, base, stride, visible, blueprint);
            #[unroll]
            for g in 0..group {
                sums[g] = own[g];
            }
        }
        if comptime!(blueprint.measures) && unit == 0 {
            #[unroll]
            for g in 0..group {
                choosing.selection.log_sum_exp[kv_head * group + g] = sums[g];
            }
        }
        if retrieves {
            set = min(context.held, comptime!(sets - 1));
            let lists = ListOffsets {
                set: own + comptime!(list(sets, width, 0)) + set * width,
                choice: own + comptime!(list(sets, width, sets)),
                radius,
            };
            let rows = LogitRows { from: base, stride };
            if comptime!(direct && staged > 0 && !blueprint.scores) {
                let mut i = visible.start + unit;
                while i < visible.local {
                    let mut some = Array::<u32>::new(chunk);
                    #[unroll]
                    for c in 0..chunk {
                        let at = min(i + c * units, visible.local - 1);
                        some[c] = choosing.scores.ordered[kv_head * stride + at];
                    }
                    #[unroll]
                    for c in 0..chunk {
                        let at = i + c * units;
                        if at < visible.local {
                            near[at] = some[c];
                        }
                    }
                    i += chunk * units;
                }
            }
            let (scores, scores_at, bits, bits_at) = if comptime!(staged > 0) {
                (&mut near[..], 0usize, &mut near_bitmasks[..], 0usize)
            } else {
                (
                    &mut choosing.scores.ordered[..],
                    kv_head * stride,
                    &mut choosing.selection.bitmasks[..],
                    marked,
                )
            };
            let place = BitmaskPlace { marked: bits_at, words };
            let search = TopkSearch { rows, sums, base: scores_at, place, lists, wanted };
            let listed = select_topk(
                &choosing.scores.logits,
                scores,
                bits,
                &mut choosing.ranges.table,
                &search,
                visible,
                blueprint,
            );
            choice = listed.chosen;
            store_set::<F>(
                &choosing.vectors.step,
                &mut choosing.vectors.cached,
                &mut choosing.ranges.table,
                &context,
                set,
                listed.count,
                blueprint,
            );
            sync_memory(blueprint.fenced);
        }
    }
    let count = choosing.ranges.table[own + FIELDS + set * SET_FIELDS + COUNT] as usize;
    let decision = Decision { decided, count, choice };
    finish_step(&mut choosing.ranges.table, own, visible, &decision, set, blueprint)
}
