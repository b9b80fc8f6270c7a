//! Logits of parts of ranges, by rows or by tiles.

use cubecl::prelude::*;

use super::blueprint::Blueprint;
use super::log_sums::Sums;
use super::match_cached_set::{load_similarity_partials, match_cached_set};
use super::score_mma::score_mma;
use super::score_rows::score_rows;
use super::table::{DECIDED, RETRIEVES};
use super::visible_range::{VisibleRange, load_step_context};

/// Finds which ranges retrieve, and scores those: `splits` parts a range, one cube each.
///
/// # Shapes
/// As for [`step`](super::step::step).
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn score_kernel<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    vectors: &[F],
    set_vectors: &[f32],
    offsets: &[i32],
    lengths: &[i32],
    newest: &[i32],
    table: &mut [i32],
    logits: &mut [f32],
    ordered: &mut [u32],
    total_kv_heads: usize,
    kv_heads: usize,
    splits: usize,
    stride: usize,
    block: usize,
    hidden_share: u32,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let cube = CUBE_POS;
    if cube >= total_kv_heads * splits {
        terminate!();
    }
    let (kv_head, split) = (cube / splits, cube % splits);
    let (length, position) = (lengths[kv_head], newest[kv_head / kv_heads]);
    let first = load_similarity_partials::<F>(vectors, set_vectors, &*table, kv_head, blueprint);
    let context =
        load_step_context(&*table, kv_head, length, position, block, hidden_share, blueprint);
    let decision =
        match_cached_set::<F>(&first, vectors, set_vectors, &*table, &context, blueprint);
    let decided = decision.decided;
    if comptime!(blueprint.measures) || decided == i32::new(RETRIEVES as i64) {
        let mut none = Sums::none(comptime!(blueprint.held()));
        score_split::<F, N>(
            query,
            keys,
            logits,
            ordered,
            kv_head * stride,
            &mut none,
            &context.visible,
            kv_head,
            offsets[kv_head] as usize,
            split,
            splits,
            stride,
            scale,
            blueprint,
        );
    }
    // Nothing here reads this field.
    if split == 0 && UNIT_POS == 0 {
        table[context.own + DECIDED] = decided;
    }
}

/// Scores the `split`-th of `splits` parts of a range's visible slots. Where sort keys are made at
/// once, only slots between sinks and locals are scored.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn score_split<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    logits: &mut [f32],
    ordered: &mut [u32],
    base: usize,
    sums: &mut Sums,
    visible: &VisibleRange,
    kv_head: usize,
    offset: usize,
    split: usize,
    splits: usize,
    stride: usize,
    scale: f32,
    #[comptime] blueprint: Blueprint,
) {
    let gap = visible.start - visible.sinks;
    let mut from = 0usize;
    let mut count = visible.length - gap;
    if comptime!(blueprint.direct()) {
        from = visible.sinks;
        count = visible.local - visible.start;
    }
    let share = count.div_ceil(splits);
    let first = min(split * share, count);
    let end = min(first + share, count);
    if comptime!(blueprint.tiles) {
        score_mma::<F, N>(
            query,
            keys,
            logits,
            ordered,
            base,
            kv_head,
            offset,
            from + first,
            from + end,
            visible.sinks,
            gap,
            stride,
            scale,
            sums,
            blueprint,
        );
    } else {
        score_rows::<F, N>(
            query,
            keys,
            logits,
            ordered,
            base,
            kv_head,
            offset,
            from + first,
            from + end,
            visible.sinks,
            gap,
            stride,
            scale,
            sums,
            blueprint,
        );
    }
}
