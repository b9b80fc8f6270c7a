//! The first kernel: decides which ranges retrieve, and finishes the step of every other range.

use cubecl::prelude::*;

use super::kernel_args::DueRanges;
use super::tasks::{TO_RETRIEVE, TO_SCORE};
use crate::cis::blueprint::Blueprint;
use crate::cis::finish_step::{finish_step, store_shared_set};
use crate::cis::kernel_args::ComparedVectors;
use crate::cis::match_cached_set::{load_similarity_partials, match_cached_set};
use crate::cis::visible_range::load_step_context;
use crate::components::sentinels::NEW_SET;

/// Decides by one cube a range whether the range shares a cached set, and finishes the step unless
/// the range retrieves.
#[cube(launch_unchecked)]
pub(super) fn match_kernel<F: Float>(
    due: &mut DueRanges,
    vectors: &mut ComparedVectors<F>,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let kv_head = CUBE_POS;
    if kv_head >= due.ranges.total_kv_heads {
        terminate!();
    }
    let length = due.ranges.lengths[kv_head];
    let position = due.ranges.newest[kv_head / due.ranges.kv_heads];
    let first = load_similarity_partials::<F>(
        &vectors.step,
        &vectors.cached,
        &due.ranges.table,
        kv_head,
        blueprint,
    );
    let context = load_step_context(&due.ranges, kv_head, length, position, blueprint);
    let decision = match_cached_set::<F>(
        &first,
        &vectors.step,
        &vectors.cached,
        &due.ranges.table,
        &context,
        blueprint,
    );
    let decided = decision.decided;
    let retrieves = decided == i32::new(NEW_SET as i64);
    store_shared_set::<F>(
        &vectors.step,
        &mut vectors.cached,
        &mut due.ranges.table,
        &context,
        decided,
        blueprint,
    );
    if !retrieves {
        let set = max(decided, 0i32) as usize;
        let (own, visible) = (context.own, &context.visible);
        finish_step(&mut due.ranges.table, own, visible, &decision, set, blueprint);
    }
    if UNIT_POS == 0 {
        let also = comptime!(if blueprint.measures { TO_SCORE } else { 0 });
        let all = comptime!(TO_SCORE | TO_RETRIEVE);
        due.tasks[kv_head] = select(retrieves, all, also);
    }
}
