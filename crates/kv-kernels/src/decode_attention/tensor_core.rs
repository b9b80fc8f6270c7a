//! The kernel for matrix instructions: f16 and bf16, 16 slots at a time in each plane of 32.
//!
//! Keys and values go from memory to registers in 16-byte pieces, in the layout in which the
//! products take them.

use cubecl::prelude::*;

use super::ViewKind;
use super::blueprint::{Blueprint, Logits, PLANES, Parts, TILE, stride_of};
use super::meet::{
    Nominees, PLANE, Received, Sums, elect, exchange, meet, nominate, write_joined, write_met,
};
use super::products::{Rows, dots_of, nothing_yet, read_queries, take_values};
use super::shared::{LOWEST, Seen, seen_of, slot_at};
use super::tiles::{place_of, read_keys, read_values, read_weights};
use super::together::{Sequence, give_up_together, publish};
use super::weakest::{Weighed, norms_ahead, weakest};
use crate::cluster::arrive_at_cluster;
use crate::evicting_attention::weigh::{NOWHERE, next_place};

/// # Shapes
/// In pairs of elements, as 32-bit words: `query` `[B, Hkv, G, D / 2]`, `keys` `[S, D / 2]`,
/// `values` `[S, D / 2]` in vectors of `N` words, so that 8 lanes take a multiple of a row. In f32:
/// `log_sum_exp` `[B, Hkv, G]`, `scores` `[S, G]`; where the range is split, `partial` `[B, Hkv,
/// splits, G, D]` and `stats` `[B, Hkv, splits, G, 2]` (maximum, sum). Where slots are given up,
/// `scores`, `partial`, `stats` and `view` are as [`Logits::Weighed`] says.
#[cube(launch_unchecked, fast_math = FastMath::ReducedPrecision.into())]
#[allow(clippy::too_many_arguments)]
pub(super) fn tensor_core_kernel<E: Float, N: Size>(
    query: &[Vector<u32, Const<2>>],
    keys: &[Vector<u32, Const<4>>],
    values: &[Vector<u32, N>],
    log_weights: &[f32],
    numerators: &[f32],
    offsets: &[i32],
    lengths: &[i32],
    view: &[i32],
    output: &mut [E],
    log_sum_exp: &mut [f32],
    scores: &mut [f32],
    partial: &mut [f32],
    stats: &mut [f32],
    pairs: usize,
    splits: usize,
    slots: usize,
    width: usize,
    sinks: usize,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    let cube = CUBE_POS;
    if cube >= pairs * splits {
        terminate!();
    }
    let pair = cube / splits;
    let kind = blueprint.features.view.comptime();
    let seen = seen_of(view, offsets, lengths, pair, width, sinks, kind);
    let heads = comptime!(blueprint.logits.together());
    let sequence = Sequence::of(lengths, view, pair, scores.len() / pairs, heads);
    attend::<E, N>(
        query,
        keys,
        values,
        log_weights,
        numerators,
        view,
        output,
        log_sum_exp,
        scores,
        partial,
        stats,
        &seen,
        &sequence,
        lengths[pair],
        pair,
        cube % splits,
        splits,
        slots,
        scale,
        blueprint,
    );
}

/// The same, where the cubes of a cluster have the parts of a range.
///
/// # Shapes
/// As for [`tensor_core_kernel`].
#[cube(
    launch_unchecked,
    fast_math = FastMath::ReducedPrecision.into(),
    cluster_dim = CubeDim::new_1d(blueprint.cubes() as u32)
)]
#[allow(clippy::too_many_arguments)]
pub(super) fn joined_kernel<E: Float, N: Size>(
    query: &[Vector<u32, Const<2>>],
    keys: &[Vector<u32, Const<4>>],
    values: &[Vector<u32, N>],
    log_weights: &[f32],
    numerators: &[f32],
    offsets: &[i32],
    lengths: &[i32],
    view: &[i32],
    output: &mut [E],
    log_sum_exp: &mut [f32],
    scores: &mut [f32],
    partial: &mut [f32],
    stats: &mut [f32],
    pairs: usize,
    splits: usize,
    slots: usize,
    width: usize,
    sinks: usize,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    let cube = CUBE_POS;
    if cube >= pairs * splits {
        terminate!();
    }
    let pair = cube / splits;
    let kind = blueprint.features.view.comptime();
    let seen = seen_of(view, offsets, lengths, pair, width, sinks, kind);
    let heads = comptime!(blueprint.logits.together());
    let sequence = Sequence::of(lengths, view, pair, scores.len() / pairs, heads);
    attend::<E, N>(
        query,
        keys,
        values,
        log_weights,
        numerators,
        view,
        output,
        log_sum_exp,
        scores,
        partial,
        stats,
        &seen,
        &sequence,
        lengths[pair],
        pair,
        cube % splits,
        splits,
        slots,
        scale,
        blueprint,
    );
}

/// What a cube does of a range, of which it has one of `splits` parts.
///
/// # Shapes
/// As for [`tensor_core_kernel`].
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn attend<E: Float, N: Size>(
    query: &[Vector<u32, Const<2>>],
    keys: &[Vector<u32, Const<4>>],
    values: &[Vector<u32, N>],
    log_weights: &[f32],
    numerators: &[f32],
    view: &[i32],
    output: &mut [E],
    log_sum_exp: &mut [f32],
    scores: &mut [f32],
    partial: &mut [f32],
    stats: &mut [f32],
    seen: &Seen,
    sequence: &Sequence,
    length: i32,
    pair: usize,
    split: usize,
    splits: usize,
    slots: usize,
    scale: f32,
    #[comptime] blueprint: Blueprint,
) {
    let group = blueprint.group.comptime();
    let dim = blueprint.head_dim.comptime();
    let planes = blueprint.planes.comptime();
    let features = blueprint.features.comptime();
    let kind = features.view.comptime();
    let rows = comptime!(Rows { dim: blueprint.head_dim, words: blueprint.words });
    let (pieces, blocks) = comptime!((rows.pieces(), rows.blocks()));

    let joined = comptime!(matches!(blueprint.parts, Parts::Joined(_)));
    if joined {
        arrive_at_cluster();
    }
    let cube = pair * splits + split;
    let unit = UNIT_POS as usize;
    let lane = unit % PLANE;
    let plane = unit / PLANE;
    let r = lane / 4;
    let j = lane % 4;

    let (start, count) = (seen.start, seen.count);
    // This cube's part, in whole tiles.
    let share = count.div_ceil(splits).div_ceil(TILE) * TILE;
    let first = min(split * share, count);
    let end = min(first + share, count);

    let q = read_queries::<E>(query, pair, r, j, group, rows);
    let mut running = nothing_yet(rows);

    // At least so much that only two cubes share a processor: with the registers that three would
    // leave them, waves of cubes end unevenly.
    let sums_end = comptime!(planes * group * dim);
    let mut totals = Shared::<[f32]>::new_slice(comptime!(sums_end.max(blueprint.room)));

    let staged = blueprint.staged.comptime();
    if staged {
        // Else each tile waits for its places before it reads its rows.
        let mut i = first + unit;
        while i < end {
            totals[i - first] = f32::reinterpret(slot_at(view, seen, i, slots, kind) as u32);
            i += planes * PLANE;
        }
        sync_cube();
    }

    // Reads that are marked so take 40 registers more: of cubes of fewer planes, fewer would share
    // a processor.
    let fleeting = comptime!(blueprint.planes >= PLANES);
    // Always one tile ahead: memory is never idle while a tile is worked on.
    let mut k = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * pieces));
    let mut v = Array::<Vector<u32, N>>::new(comptime!(4 * blocks));
    let mut at = Array::<usize>::new(4usize);
    let mut log_weight = Array::<f32>::new(4usize);
    let mut numerator = Array::<f32>::new(4usize);
    let weighs = comptime!(matches!(blueprint.logits, Logits::Weighed { .. }));
    // Early, so that the decision waits for nothing.
    let mut limit = 0i32;
    let mut newest = 0i32;
    if weighs {
        limit = view[pair];
        newest = i32::reinterpret(partial[pair]);
    }
    let mut tile = first + plane * TILE;
    if tile < end {
        read_keys(
            keys, view, &totals, &mut k, tile, end, seen, first, slots, r, j, pieces, kind, staged,
        );
        read_values::<N>(
            values, view, &totals, &mut v, &mut at, tile, end, seen, first, slots, r, j, blocks,
            rows.words, fleeting, kind, staged,
        );
        read_weights(log_weights, &mut log_weight, &at, slots, features.weighted);
        read_weights(numerators, &mut numerator, &at, slots, features.numerators);
    }
    let stride = stride_of(share);
    while tile < end {
        let next = tile + planes * TILE;
        let mut next_k = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * pieces));
        let mut next_v = Array::<Vector<u32, N>>::new(comptime!(4 * blocks));
        let mut next_at = Array::<usize>::new(4usize);
        // Beyond the end, the last slot is read again and weighs nothing.
        read_keys(
            keys,
            view,
            &totals,
            &mut next_k,
            next,
            end,
            seen,
            first,
            slots,
            r,
            j,
            pieces,
            kind,
            staged,
        );
        read_values::<N>(
            values,
            view,
            &totals,
            &mut next_v,
            &mut next_at,
            next,
            end,
            seen,
            first,
            slots,
            r,
            j,
            blocks,
            rows.words,
            fleeting,
            kind,
            staged,
        );
        let mut next_log = Array::<f32>::new(4usize);
        let mut next_numerator = Array::<f32>::new(4usize);
        read_weights(log_weights, &mut next_log, &next_at, slots, features.weighted);
        read_weights(numerators, &mut next_numerator, &next_at, slots, features.numerators);

        let mut dots = dots_of(&q, &k, scale, rows);
        let mut logits = Array::<f32>::new(4usize);
        #[unroll]
        for u in 0..4usize {
            let mut logit = dots[u];
            if features.weighted {
                logit += log_weight[u];
            }
            if at[u] == slots {
                logit = f32::new(LOWEST);
                dots[u] = f32::new(LOWEST);
            } else {
                if comptime!(blueprint.logits != Logits::Dropped) && r < group {
                    if comptime!(blueprint.logits == Logits::Written) {
                        scores[at[u] * group + r] = logit;
                    } else {
                        totals[sums_end + place_of(tile, u, j) - first + r * stride] = logit;
                    }
                }
            }
            logits[u] = logit;
        }
        take_values::<E, N>(
            &mut running,
            &logits,
            &dots,
            &numerator,
            &v,
            j,
            features.numerators,
            rows,
        );
        #[unroll]
        for i in 0..comptime!(2 * pieces) {
            k[i] = next_k[i];
        }
        #[unroll]
        for i in 0..comptime!(4 * blocks) {
            v[i] = next_v[i];
        }
        #[unroll]
        for u in 0..4usize {
            if comptime!(matches!(kind, ViewKind::List | ViewKind::Sets)) {
                at[u] = next_at[u];
            } else {
                // Cheaper to find than to keep.
                let i = place_of(next, u, j);
                let slot = slot_at(view, seen, min(i, end - 1), slots, kind);
                at[u] = select(i < end, slot, slots);
            }
            if features.weighted {
                log_weight[u] = next_log[u];
            }
            if features.numerators {
                numerator[u] = next_numerator[u];
            }
        }
        tile = next;
    }

    let joint = comptime!(Sums {
        group: blueprint.group,
        dim: blueprint.head_dim,
        planes: blueprint.planes,
        numerators: features.numerators,
        log_sum_exp: features.log_sum_exp,
    });
    // A head below its limit has nothing to look for.
    let mut full = length >= limit;
    let together = comptime!(blueprint.logits.together());
    if comptime!(together > 0) {
        full = sequence.full;
    }
    let weighed = Weighed {
        start,
        first,
        count: select(full, end - first, 0usize),
        logits_at: sums_end.runtime(),
        stride,
        newest,
    };
    let norms = norms_ahead(numerators, &weighed, weighs, joined, joint);
    let (mut joint_maxima, mut joint_weights) = meet(&running, &mut totals, rows, joint);
    if comptime!(blueprint.logits == Logits::Collected) {
        let mut i = unit;
        while i < (end - first) * group {
            scores[(start + first) * group + i] = totals[sums_end + i / group + i % group * stride];
            i += planes * PLANE;
        }
    }
    let cubes = blueprint.cubes().comptime();
    let received = Received::room(cubes, joint);
    if joined {
        exchange(&received, &totals, &mut joint_maxima, &mut joint_weights, split, cubes, joint);
    }

    // What other cubes are told or asked travels while the output is written.
    let spares = comptime!(matches!(blueprint.logits, Logits::Weighed { spares_newest: true, .. }));
    let nominees = Nominees::room(cubes);
    let mut arrived = 0u32;
    let mut place = i32::new(NOWHERE as i64);
    if comptime!(together > 0) {
        arrived = publish(
            &totals,
            &joint_maxima,
            &joint_weights,
            &norms,
            numerators,
            &weighed,
            scores,
            &*stats,
            sequence,
            pair,
            split,
            joined,
            joint,
        );
    } else if weighs {
        let (key, weakest) = weakest(
            &totals,
            &joint_maxima,
            &joint_weights,
            &norms,
            numerators,
            &weighed,
            spares,
            joined,
            joint,
        );
        place = weakest;
        if joined {
            nominate(&nominees, key, weakest, split);
        }
    }
    if joined {
        write_joined::<E>(
            &received,
            &joint_maxima,
            &joint_weights,
            output,
            log_sum_exp,
            pair,
            split,
            cubes,
            joint,
        );
    } else {
        let is_part = comptime!(blueprint.parts == Parts::Written);
        write_met::<E>(
            &totals,
            &joint_maxima,
            &joint_weights,
            output,
            log_sum_exp,
            partial,
            stats,
            pair,
            cube,
            is_part,
            joint,
        );
    }
    if comptime!(together > 0) {
        give_up_together(
            arrived, &*scores, stats, partial, &weighed, sequence, pair, length, split, splits,
            together, spares, joined, joint,
        );
    } else if weighs {
        if joined {
            place = elect(&nominees, split, cubes);
        }
        if unit == 0 && split == 0 {
            partial[pair] = f32::reinterpret(next_place(place, newest, full, length));
        }
    }
}
