//! Top-k selection in one range by one cube: the `k_top` highest scores, and the neighbours of the
//! `k_dilate` highest scores.

use cubecl::prelude::*;

use super::ScoreReduction;
use super::bitmask::{BitmaskPlace, compared, lowest_bits, own_words, sync_scratch};
use super::blueprint::Blueprint;
use super::compact_bitmask::{CompactedSet, ListOffsets, compact_bitmask};
use super::radix_pivots::find_pivots;
use super::table::{DILATED, ROUNDING, TOP};
use super::visible_range::VisibleRange;
use crate::components::prefix_sum::exclusive;
use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::larger;
use crate::components::sort_key::sort_key;

/// The scores of a range, the sizes to select, and where the results go.
#[derive(CubeType)]
pub(super) struct TopkSearch {
    pub(super) rows: LogitRows,
    /// Log-sum-exps of the query heads, `[G]`. A score is a logit less its query's log-sum-exp.
    pub(super) sums: Array<f32>,
    /// Where the range's sort keys begin.
    pub(super) base: usize,
    pub(super) place: BitmaskPlace,
    pub(super) lists: ListOffsets,
    pub(super) wanted: TopkSizes,
}

/// Selects the highest scores and lists their tokens in three phases: makes sort keys
/// ([`order_all`]), sets the bits of the highest ([`set_bitmask`]), and lists the tokens
/// ([`compact_bitmask`]).
#[cube]
pub(super) fn select_topk(
    logits: &[f32],
    keys: &mut [u32],
    bitmasks: &mut [u32],
    table: &mut [i32],
    search: &TopkSearch,
    visible: &VisibleRange,
    #[comptime] blueprint: Blueprint,
) -> CompactedSet {
    if comptime!(!blueprint.direct()) {
        order_all(logits, keys, search, visible, blueprint);
    }
    sync_scratch(blueprint);
    let (place, wanted) = (&search.place, &search.wanted);
    set_bitmask(&*keys, search.base, bitmasks, place, visible, wanted, blueprint);
    sync_scratch(blueprint);
    compact_bitmask(bitmasks, place, table, visible, &search.lists, false, blueprint)
}

/// Where a range's logits begin, and the distance between the logits of two query heads.
#[derive(CubeType, Clone, Copy)]
pub(super) struct LogitRows {
    pub(super) from: usize,
    pub(super) stride: usize,
}

/// How many slots are selected (`k`), and how many of them are dilated (`m`).
#[derive(CubeType, Clone, Copy)]
pub(super) struct TopkSizes {
    pub(super) k_top: usize,
    pub(super) dilated: usize,
}

#[cube]
impl TopkSizes {
    /// The number of highest slots to search for: `m`, but at least 1, as the search needs a rank.
    pub(super) fn k_dilate(&self) -> usize {
        max(min(self.dilated, self.k_top), 1usize)
    }
}

/// Loads the sizes from the range's row of the table, at `own`.
#[cube]
pub(super) fn load_topk_sizes(table: &[i32], own: usize) -> TopkSizes {
    let top = table[own + TOP] as usize;
    let share = f32::reinterpret(table[own + DILATED]);
    let dilated = min((f32::cast_from(top) * share + ROUNDING) as usize, top);
    TopkSizes { k_top: top, dilated }
}

/// The score of a slot from its logits: the logarithm of the sum, or of the largest, of its
/// weights.
#[cube]
pub(super) fn score_of(
    logits: &Array<f32>,
    sums: &Array<f32>,
    #[comptime] blueprint: Blueprint,
) -> f32 {
    let group = blueprint.group.comptime();
    let mut best = f32::new(LOWEST_LOGIT);
    #[unroll]
    for g in 0..group {
        best = larger(best, logits[g] - sums[g]);
    }
    if comptime!(group > 1 && blueprint.reduction == ScoreReduction::Sum) {
        let mut sum = 0.0f32;
        #[unroll]
        for g in 0..group {
            sum += (logits[g] - sums[g] - best).exp();
        }
        best += sum.ln();
    }
    best
}

/// Makes the sort keys of all slots between sinks and locals.
#[cube]
fn order_all(
    logits: &[f32],
    keys: &mut [u32],
    search: &TopkSearch,
    visible: &VisibleRange,
    #[comptime] blueprint: Blueprint,
) {
    let group = blueprint.group.comptime();
    let mut i = visible.start + UNIT_POS as usize;
    while i < visible.local {
        let mut own = Array::<f32>::new(group);
        #[unroll]
        for g in 0..group {
            own[g] = logits[search.rows.from + g * search.rows.stride + i];
        }
        keys[search.base + i] = sort_key(score_of(&own, &search.sums, blueprint));
        i += blueprint.units.comptime();
    }
}

/// Sets the bits of the `k_top` slots with the highest sort keys, ties by the lowest slot. In the
/// next bitmask, sets the bits of the `k_dilate` highest.
///
/// # Shapes
/// `keys` from `base` on; `bitmasks` from `place.marked` on, `[3, words]`, a bit a slot.
#[cube]
pub(super) fn set_bitmask(
    keys: &[u32],
    base: usize,
    bitmasks: &mut [u32],
    place: &BitmaskPlace,
    visible: &VisibleRange,
    wanted: &TopkSizes,
    #[comptime] blueprint: Blueprint,
) {
    let units = blueprint.units.comptime();
    let chunk = blueprint.chunk.comptime();
    let (marked, words) = (place.marked, place.words);
    let (start, local) = (visible.start, visible.local);
    let (k_top, k_dilate) = (u32::cast_from(wanted.k_top), u32::cast_from(wanted.k_dilate()));
    let (pivot_top, pivot_dilate) =
        find_pivots(keys, base, start, local, k_top, k_dilate, blueprint);

    // Each unit has neighbouring words, so that a prefix sum gives its rank among equal keys. The
    // rank matters where not all equal keys are selected.
    let (first, last) = own_words(local, units);
    let mut parts = Shared::<[u32]>::new_slice(comptime!(blueprint.planes()));
    let room = k_top - pivot_top.n_greater;
    let room_best = k_dilate - pivot_dilate.n_greater;
    let mut rank = 0u32;
    let mut rank_best = 0u32;
    if pivot_top.n_equal > room || pivot_dilate.n_equal > room_best {
        let mut equal = 0u32;
        let mut equal_best = 0u32;
        for word in first..last {
            let own =
                compared(keys, base, word, start, local, pivot_top.key, pivot_dilate.key, chunk);
            equal += own.equal.count_ones();
            equal_best += own.equal_best.count_ones();
        }
        let (before, _) = exclusive(equal, &mut parts);
        let (before_best, _) = exclusive(equal_best, &mut parts);
        rank = before;
        rank_best = before_best;
    }
    for word in first..last {
        let own = compared(keys, base, word, start, local, pivot_top.key, pivot_dilate.key, chunk);
        bitmasks[marked + word] = own.above | lowest_bits(own.equal, room - min(rank, room));
        let best = lowest_bits(own.equal_best, room_best - min(rank_best, room_best));
        bitmasks[marked + words + word] = select(wanted.dilated == 0, 0u32, own.above_best | best);
        rank += own.equal.count_ones();
        rank_best += own.equal_best.count_ones();
    }
}
