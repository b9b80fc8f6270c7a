//! Logits of ranges in parts, so that several cubes score one range: by tiles (`score_mma.rs`) with
//! matrix instructions, else by rows (`score_rows.rs`).

use cubecl::prelude::*;

use super::blueprint::Blueprint;
use super::kernel_args::{ComparedVectors, ScoredKeys, Scores, StepRanges};
use super::log_sums::Sums;
use super::match_cached_set::{load_similarity_partials, match_cached_set};
use super::score_mma::score_mma;
use super::score_rows::{ScoredSpan, score_rows};
use super::table::DECIDED;
use super::visible_range::{VisibleRange, load_step_context};
use crate::components::sentinels::NEW_SET;

/// Decides which ranges retrieve, and scores them: `splits` parts a range, one cube a part.
#[cube(launch_unchecked)]
pub(super) fn score_kernel<F: Float, N: Size>(
    keys: &ScoredKeys<F, N>,
    ranges: &mut StepRanges,
    vectors: &ComparedVectors<F>,
    scores: &mut Scores,
    splits: usize,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let cube = CUBE_POS;
    if cube >= ranges.total_kv_heads * splits {
        terminate!();
    }
    let (kv_head, split) = (cube / splits, cube % splits);
    let (length, position) = (ranges.lengths[kv_head], ranges.newest[kv_head / ranges.kv_heads]);
    let first = load_similarity_partials::<F>(
        &vectors.step,
        &vectors.cached,
        &ranges.table,
        kv_head,
        blueprint,
    );
    let context = load_step_context(&*ranges, kv_head, length, position, blueprint);
    let decision = match_cached_set::<F>(
        &first,
        &vectors.step,
        &vectors.cached,
        &ranges.table,
        &context,
        blueprint,
    );
    let decided = decision.decided;
    if comptime!(blueprint.measures) || decided == i32::new(NEW_SET as i64) {
        let mut none = Sums::none(comptime!(blueprint.held()));
        let stride = scores.stride;
        let share = ScoreShare {
            kv_head,
            offset: ranges.offsets[kv_head] as usize,
            split,
            splits,
            base: kv_head * stride,
            stride,
        };
        score_split::<F, N>(
            keys,
            &mut scores.logits,
            &mut scores.ordered,
            &mut none,
            &share,
            &context.visible,
            blueprint,
        );
    }
    // No cube of this launch reads this field.
    if split == 0 && UNIT_POS == 0 {
        ranges.table[context.own + DECIDED] = decided;
    }
}

/// The part of a range that a cube scores.
#[derive(CubeType, Clone, Copy)]
pub(super) struct ScoreShare {
    /// The range, and its first slot.
    pub(super) kv_head: usize,
    pub(super) offset: usize,
    /// The number of the part, of `splits` parts.
    pub(super) split: usize,
    pub(super) splits: usize,
    /// Where the range's sort keys begin.
    pub(super) base: usize,
    /// The distance between the logits of two query heads.
    pub(super) stride: usize,
}

/// Scores a part of a range's visible slots. Where sort keys are made directly, only slots between
/// sinks and locals are scored, as no log-sum-exp is needed.
#[cube]
pub(super) fn score_split<F: Float, N: Size>(
    keys: &ScoredKeys<F, N>,
    logits: &mut [f32],
    ordered: &mut [u32],
    sums: &mut Sums,
    share: &ScoreShare,
    visible: &VisibleRange,
    #[comptime] blueprint: Blueprint,
) {
    let gap = visible.start - visible.sinks;
    let mut from = 0usize;
    let mut count = visible.length - gap;
    if comptime!(blueprint.direct()) {
        from = visible.sinks;
        count = visible.local - visible.start;
    }
    let part = count.div_ceil(share.splits);
    let first = min(share.split * part, count);
    let end = min(first + part, count);
    let span = ScoredSpan {
        kv_head: share.kv_head,
        offset: share.offset,
        first: from + first,
        end: from + end,
        sinks: visible.sinks,
        gap,
        base: share.base,
        stride: share.stride,
    };
    if comptime!(blueprint.tiles) {
        score_mma::<F, N>(keys, logits, ordered, sums, &span, blueprint);
    } else {
        score_rows::<F, N>(keys, logits, ordered, sums, &span, blueprint);
    }
}
