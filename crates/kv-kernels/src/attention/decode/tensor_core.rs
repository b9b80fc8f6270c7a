//! The kernel for matrix instructions: f16 and bf16, 16 slots at a time in each plane of 32.
//!
//! Keys and values go from memory to registers in 16-byte pieces, in the layout in which the
//! products take them.

use cubecl::prelude::*;

use super::ViewKind;
use super::argmin_importance::{
    CandidateSlots, ClusterArgmin, argmin_importance, cluster_argmin, next_write_slot,
    prefetch_log_norms, send_argmin,
};
use super::blueprint::{Blueprint, KvSplit, LogitsSink, MMA_KEYS, PLANES, stride_of};
use super::eviction::Eviction;
use super::mma_fragments::{key_index, read_keys, read_values, read_weights};
use super::products::{Rows, dots_of, nothing_yet, read_queries, take_values};
use super::slot_indexer::SlotIndexer;
use super::split_kv_reduce::{
    ClusterPartials, PLANE, PartialShape, cluster_exchange, cluster_reduce, reduce_warps,
    write_partial,
};
use super::together::{Sequence, give_up_together, publish};
use crate::components::cluster::arrive_at_cluster;
use crate::components::sentinels::{LOWEST_LOGIT, NO_INDEX};

/// # Shapes
/// In pairs of elements, as 32-bit words: `query` `[B, Hkv, G, D / 2]`, `keys` `[S, D / 2]`,
/// `values` `[S, D / 2]` in vectors of `N` words, so that 8 lanes take a multiple of a row. In f32:
/// `log_sum_exp` `[B, Hkv, G]`, `scores` `[S, G]`; where the range is split, `partial` `[B, Hkv,
/// splits, G, D]` and `stats` `[B, Hkv, splits, G, 2]` (maximum, sum). There is an `eviction` where
/// logits go to [`LogitsSink::ArgminInPlace`].
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
    eviction: &mut ComptimeOption<Eviction>,
    total_kv_heads: usize,
    splits: usize,
    slots: usize,
    width: usize,
    sinks: usize,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    let cube = CUBE_POS;
    if cube >= total_kv_heads * splits {
        terminate!();
    }
    let kv_head = cube / splits;
    let kind = blueprint.features.view.comptime();
    let indexer = SlotIndexer::new(view, offsets, lengths, kv_head, width, sinks, kind);
    let sequence = Sequence::of(lengths, &*eviction, kv_head, total_kv_heads, blueprint.logits);
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
        eviction,
        &indexer,
        &sequence,
        lengths[kv_head],
        kv_head,
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
    eviction: &mut ComptimeOption<Eviction>,
    total_kv_heads: usize,
    splits: usize,
    slots: usize,
    width: usize,
    sinks: usize,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    let cube = CUBE_POS;
    if cube >= total_kv_heads * splits {
        terminate!();
    }
    let kv_head = cube / splits;
    let kind = blueprint.features.view.comptime();
    let indexer = SlotIndexer::new(view, offsets, lengths, kv_head, width, sinks, kind);
    let sequence = Sequence::of(lengths, &*eviction, kv_head, total_kv_heads, blueprint.logits);
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
        eviction,
        &indexer,
        &sequence,
        lengths[kv_head],
        kv_head,
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
    eviction: &mut ComptimeOption<Eviction>,
    indexer: &SlotIndexer,
    sequence: &Sequence,
    length: i32,
    kv_head: usize,
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

    let joined = comptime!(matches!(blueprint.parts, KvSplit::Cluster(_)));
    if joined {
        arrive_at_cluster();
    }
    let cube = kv_head * splits + split;
    let unit = UNIT_POS as usize;
    let lane = unit % PLANE;
    let plane = unit / PLANE;
    let r = lane / 4;
    let j = lane % 4;

    let (start, count) = (indexer.start, indexer.count);
    // This cube's part, in whole tiles.
    let share = count.div_ceil(splits).div_ceil(MMA_KEYS) * MMA_KEYS;
    let first = min(split * share, count);
    let end = min(first + share, count);

    let q = read_queries::<E>(query, kv_head, r, j, group, rows);
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
            totals[i - first] = f32::reinterpret(indexer.slot(view, i, slots, kind) as u32);
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
    // Early, so that the decision waits for nothing.
    let mut limit = 0i32;
    let mut newest = 0i32;
    #[comptime]
    if let ComptimeOption::Some(eviction) = eviction {
        limit = eviction.limits[kv_head];
        newest = eviction.write_slots[kv_head];
    }
    let mut tile = first + plane * MMA_KEYS;
    if tile < end {
        read_keys(
            keys, view, &totals, &mut k, tile, end, indexer, first, slots, r, j, pieces, kind,
            staged,
        );
        read_values::<N>(
            values, view, &totals, &mut v, &mut at, tile, end, indexer, first, slots, r, j, blocks,
            rows.words, fleeting, kind, staged,
        );
        read_weights(log_weights, &mut log_weight, &at, slots, features.weighted);
        read_weights(numerators, &mut numerator, &at, slots, features.numerators);
    }
    let stride = stride_of(share);
    while tile < end {
        let next = tile + planes * MMA_KEYS;
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
            indexer,
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
            indexer,
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
                logit = f32::new(LOWEST_LOGIT);
                dots[u] = f32::new(LOWEST_LOGIT);
            } else {
                if comptime!(blueprint.logits != LogitsSink::None) && r < group {
                    if comptime!(blueprint.logits == LogitsSink::Global) {
                        scores[at[u] * group + r] = logit;
                    } else {
                        totals[sums_end + key_index(tile, u, j) - first + r * stride] = logit;
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
                let i = key_index(next, u, j);
                let slot = indexer.slot(view, min(i, end - 1), slots, kind);
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

    let joint = comptime!(PartialShape {
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
    let candidates_of_cube = CandidateSlots {
        start,
        first,
        count: select(full, end - first, 0usize),
        logits_at: sums_end.runtime(),
        stride,
        newest,
    };
    let norms = prefetch_log_norms(&*eviction, &candidates_of_cube, joined, joint);
    let (mut joint_maxima, mut joint_weights) = reduce_warps(&running, &mut totals, rows, joint);
    if comptime!(blueprint.logits == LogitsSink::Shared) {
        let mut i = unit;
        while i < (end - first) * group {
            scores[(start + first) * group + i] = totals[sums_end + i / group + i % group * stride];
            i += planes * PLANE;
        }
    }
    let cubes = blueprint.cubes().comptime();
    let received = ClusterPartials::room(cubes, joint);
    if joined {
        cluster_exchange(
            &received,
            &totals,
            &mut joint_maxima,
            &mut joint_weights,
            split,
            cubes,
            joint,
        );
    }

    // What other cubes are told or asked travels while the output is written.
    let spares = comptime!(matches!(
        blueprint.logits,
        LogitsSink::ArgminInPlace { spares_newest: true, .. }
    ));
    let candidates = ClusterArgmin::room(cubes);
    let mut arrived = 0u32;
    let mut place = i32::new(NO_INDEX as i64);
    #[comptime]
    if let ComptimeOption::Some(eviction) = eviction {
        if comptime!(together > 0) {
            arrived = publish(
                &totals,
                &joint_maxima,
                &joint_weights,
                &norms,
                eviction,
                &candidates_of_cube,
                sequence,
                kv_head,
                split,
                joined,
                joint,
            );
        } else {
            let (key, argmin) = argmin_importance(
                &totals,
                &joint_maxima,
                &joint_weights,
                &norms,
                &eviction.log_norms,
                &candidates_of_cube,
                spares,
                joined,
                joint,
            );
            place = argmin;
            if joined {
                send_argmin(&candidates, key, argmin, split);
            }
        }
    }
    if joined {
        cluster_reduce::<E>(
            &received,
            &joint_maxima,
            &joint_weights,
            output,
            log_sum_exp,
            kv_head,
            split,
            cubes,
            joint,
        );
    } else {
        let is_part = comptime!(blueprint.parts == KvSplit::Global);
        write_partial::<E>(
            &totals,
            &joint_maxima,
            &joint_weights,
            output,
            log_sum_exp,
            partial,
            stats,
            kv_head,
            cube,
            is_part,
            joint,
        );
    }
    #[comptime]
    if let ComptimeOption::Some(eviction) = eviction {
        if comptime!(together > 0) {
            give_up_together(
                arrived,
                eviction,
                &candidates_of_cube,
                sequence,
                kv_head,
                length,
                split,
                splits,
                together,
                spares,
                joined,
                joint,
            );
        } else {
            if joined {
                place = cluster_argmin(&candidates, split, cubes);
            }
            if unit == 0 && split == 0 {
                eviction.write_slots[kv_head] = next_write_slot(place, newest, full, length);
            }
        }
    }
}
