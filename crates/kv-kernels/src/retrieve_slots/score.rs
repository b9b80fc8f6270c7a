//! Logits of parts of ranges, by rows or by tiles.

use cubecl::prelude::*;

use super::decide::{decide, glimpse};
use super::kernel::Blueprint;
use super::rows::score_part;
use super::sift::Sums;
use super::sight::{Sight, outset_of};
use super::table::{DECIDED, DISTANCE, RETRIEVES};
use super::tiles::score_tiles;

/// Decides which ranges retrieve, and scores those, `splits` parts a range, a cube each.
///
/// # Shapes
/// As for [`step`](super::kernel::step), but `norms` `[P, splits]`.
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
    norms: &mut [f32],
    pairs: usize,
    kv_heads: usize,
    splits: usize,
    stride: usize,
    block: usize,
    hidden: u32,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let cube = CUBE_POS;
    if cube >= pairs * splits {
        terminate!();
    }
    let (pair, split) = (cube / splits, cube % splits);
    let (length, position) = (lengths[pair], newest[pair / kv_heads]);
    let first = glimpse::<F>(vectors, set_vectors, &*table, pair, blueprint);
    let outset = outset_of(&*table, pair, length, position, block, hidden, blueprint);
    let decision = decide::<F>(&first, vectors, set_vectors, &*table, pair, &outset, blueprint);
    let decided = decision.decided;
    if comptime!(blueprint.measures) || decided == i32::new(RETRIEVES as i64) {
        let mut none = Sums::none(comptime!(blueprint.held()));
        score_split::<F, N>(
            query,
            keys,
            logits,
            ordered,
            pair * stride,
            norms,
            &mut none,
            &outset.sight,
            pair,
            offsets[pair] as usize,
            split,
            splits,
            stride,
            scale,
            blueprint,
        );
    }
    // Nothing here reads these fields.
    if split == 0 && UNIT_POS == 0 {
        table[outset.own + DECIDED] = decided;
        table[outset.own + DISTANCE] = i32::reinterpret(decision.distance);
    }
}

/// Scores the `split`-th of `splits` parts of what a range has in sight, and notes the largest norm
/// of its keys. Where logits are ordered as they are made, it is of what lies between sinks and
/// locals alone.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn score_split<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    logits: &mut [f32],
    ordered: &mut [u32],
    base: usize,
    norms: &mut [f32],
    sums: &mut Sums,
    sight: &Sight,
    pair: usize,
    offset: usize,
    split: usize,
    splits: usize,
    stride: usize,
    scale: f32,
    #[comptime] blueprint: Blueprint,
) {
    let gap = sight.start - sight.sinks;
    let mut from = 0usize;
    let mut count = sight.length - gap;
    if comptime!(blueprint.direct()) {
        from = sight.sinks;
        count = sight.local - sight.start;
    }
    let share = count.div_ceil(splits);
    let first = min(split * share, count);
    let end = min(first + share, count);
    let norm = if comptime!(blueprint.tiles) {
        score_tiles::<F, N>(
            query,
            keys,
            logits,
            ordered,
            base,
            pair,
            offset,
            from + first,
            from + end,
            sight.sinks,
            gap,
            stride,
            scale,
            sums,
            blueprint,
        )
    } else {
        score_part::<F, N>(
            query,
            keys,
            logits,
            ordered,
            base,
            pair,
            offset,
            from + first,
            from + end,
            sight.sinks,
            gap,
            stride,
            scale,
            sums,
            blueprint,
        )
    };
    if comptime!(blueprint.certified) {
        let mut largest = Shared::<[f32]>::new_slice(comptime!(blueprint.planes()));
        let norm = plane_max(norm);
        if UNIT_POS_PLANE == 0 {
            largest[(UNIT_POS / PLANE_DIM) as usize] = norm;
        }
        sync_cube();
        if UNIT_POS == 0 {
            let mut most = 0.0f32;
            for plane in 0..(CUBE_DIM / PLANE_DIM) as usize {
                most = max(most, largest[plane]);
            }
            norms[pair * splits + split] = most;
        }
    }
}
