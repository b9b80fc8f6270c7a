//! The first kernel: which ranges retrieve, and the end of the step for those that do not.

use cubecl::prelude::*;

use super::tasks;
use crate::cis::blueprint::Blueprint;
use crate::cis::finish_step::{finish_step, store_shared_set};
use crate::cis::match_cached_set::{load_similarity_partials, match_cached_set};
use crate::cis::table::RETRIEVES;
use crate::cis::visible_range::load_step_context;

/// Finds, one cube a range, whether the range shares a cached set, and finishes the step if it does
/// not retrieve.
///
/// # Shapes
/// As for [`step`](crate::cis::step::step); `tasks` `[P]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn match_kernel<F: Float>(
    vectors: &[F],
    set_vectors: &mut [f32],
    lengths: &[i32],
    newest: &[i32],
    table: &mut [i32],
    tasks: &mut [u32],
    total_kv_heads: usize,
    kv_heads: usize,
    block: usize,
    hidden_share: u32,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let kv_head = CUBE_POS;
    if kv_head >= total_kv_heads {
        terminate!();
    }
    let (length, position) = (lengths[kv_head], newest[kv_head / kv_heads]);
    let first = load_similarity_partials::<F>(vectors, &*set_vectors, &*table, kv_head, blueprint);
    let context =
        load_step_context(&*table, kv_head, length, position, block, hidden_share, blueprint);
    let decision =
        match_cached_set::<F>(&first, vectors, &*set_vectors, &*table, &context, blueprint);
    let decided = decision.decided;
    let retrieves = decided == i32::new(RETRIEVES as i64);
    store_shared_set::<F>(vectors, set_vectors, table, &context, decided, blueprint);
    if !retrieves {
        let set = max(decided, 0i32) as usize;
        let (own, visible) = (context.own, &context.visible);
        finish_step(table, own, visible, &decision, set, blueprint);
    }
    if UNIT_POS == 0 {
        let also = comptime!(if blueprint.measures { tasks::SCORES } else { 0 });
        let all = comptime!(tasks::SCORES | tasks::RETRIEVES);
        tasks[kv_head] = select(retrieves, all, also);
    }
}
