//! Decode attention by matrix instructions, for f16 and bf16: `o = Σ_i a_i exp(s_i) v_i / Σ_i w_i
//! exp(s_i)`, with `s_i = scale · q · k_i`. Each plane of 32 units takes 16 slots at a time, and
//! the products serve all query heads of a group at once. `plain.rs` serves other dtypes and
//! devices.
//!
//! Keys and values go from global memory to registers in 16-byte pieces, in the layout in which the
//! products take them.

use cubecl::prelude::*;

use super::ViewKind;
use super::argmin_importance::{
    CandidateSlots, ClusterArgmin, argmin_importance, cluster_argmin, next_write_slot,
    prefetch_log_norms, send_argmin,
};
use super::blueprint::{Blueprint, KvSplit, LogitsSink, MMA_KEYS, PLANES, stride_of};
use super::eviction::Eviction;
use super::kernel_args::{AttendedRanges, DecodeOutputs, Queries, WeightedPool};
use super::mma_fragments::{
    PartSlots, Rows, TileLane, TileSlots, key_index, read_keys, read_values,
};
use super::products::{dots_of, nothing_yet, read_queries, take_values};
use super::range_part::RangePart;
use super::split_kv_reduce::{
    ClusterPartials, PLANE, PartialShape, cluster_exchange, cluster_reduce, reduce_warps,
    write_partial,
};
use super::together::{TogetherRules, give_up_together, publish};
use crate::components::cluster::arrive_at_cluster;
use crate::components::sentinels::{LOWEST_LOGIT, NO_INDEX};

/// Attends by one cube for each part of a range. Queries, keys and values are pairs of elements, as
/// 32-bit words. Values are in vectors of `N` words, so that a row is a whole number of reads by 8
/// lanes. There is an `eviction` where logits go to [`LogitsSink::ArgminInPlace`].
#[cube(launch_unchecked, fast_math = FastMath::ReducedPrecision.into())]
pub(super) fn tensor_core_kernel<E: Float, N: Size>(
    queries: &Queries<Vector<u32, Const<2>>>,
    ranges: &AttendedRanges,
    pool: &WeightedPool<Vector<u32, Const<4>>, Vector<u32, N>>,
    outputs: &mut DecodeOutputs<E, f32>,
    eviction: &mut ComptimeOption<Eviction>,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    if CUBE_POS >= ranges.total_kv_heads * ranges.splits {
        terminate!();
    }
    let part = ranges.part(&*eviction, CUBE_POS, blueprint);
    attend::<E, N>(queries, pool, &ranges.view, &part, outputs, eviction, blueprint);
}

/// [`tensor_core_kernel`], where the cubes of a cluster take the parts of a range and join them.
#[cube(
    launch_unchecked,
    fast_math = FastMath::ReducedPrecision.into(),
    cluster_dim = CubeDim::new_1d(blueprint.cubes() as u32)
)]
pub(super) fn joined_kernel<E: Float, N: Size>(
    queries: &Queries<Vector<u32, Const<2>>>,
    ranges: &AttendedRanges,
    pool: &WeightedPool<Vector<u32, Const<4>>, Vector<u32, N>>,
    outputs: &mut DecodeOutputs<E, f32>,
    eviction: &mut ComptimeOption<Eviction>,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    if CUBE_POS >= ranges.total_kv_heads * ranges.splits {
        terminate!();
    }
    let part = ranges.part(&*eviction, CUBE_POS, blueprint);
    attend::<E, N>(queries, pool, &ranges.view, &part, outputs, eviction, blueprint);
}

/// Attends to one cube's `part` of a range, and writes its output, sums and logits as `blueprint`
/// says. `view` is [`AttendedRanges::view`], or the table of index sets.
#[cube]
pub(crate) fn attend<E: Float, N: Size>(
    queries: &Queries<Vector<u32, Const<2>>>,
    pool: &WeightedPool<Vector<u32, Const<4>>, Vector<u32, N>>,
    view: &[i32],
    part: &RangePart,
    outputs: &mut DecodeOutputs<E, f32>,
    eviction: &mut ComptimeOption<Eviction>,
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
    let (kv_head, split, splits) = (part.kv_head, part.split, part.splits);
    let cube = kv_head * splits + split;
    let unit = UNIT_POS as usize;
    let lane = unit % PLANE;
    let plane = unit / PLANE;
    let r = lane / 4;
    let j = lane % 4;

    let (start, count) = (part.indexer.start, part.indexer.count);
    let slots = pool.slots;
    // This cube's share of the slots, in whole tiles.
    let share = count.div_ceil(splits).div_ceil(MMA_KEYS) * MMA_KEYS;
    let first = min(split * share, count);
    let end = min(first + share, count);

    let q = read_queries::<E>(&queries.rows, kv_head, r, j, group, rows);
    let mut running = nothing_yet(rows);

    // The cube takes at least so much shared memory that only two cubes run on a processor. Three
    // would have too few registers each, and their waves end unevenly.
    let sums_end = comptime!(planes * group * dim);
    let mut totals = Shared::<[f32]>::new_slice(comptime!(sums_end.max(blueprint.room)));

    let staged = blueprint.staged.comptime();
    if staged {
        // Listed slots are copied to shared memory first. Otherwise each tile would wait for its
        // slots before it could read its rows. They are kept as bits in the memory of the sums:
        // with separate shared memory for integers, fewer cubes would fit on a processor.
        let mut i = first + unit;
        while i < end {
            totals[i - first] = f32::reinterpret(part.indexer.slot(view, i, slots, kind) as u32);
            i += planes * PLANE;
        }
        sync_cube();
    }

    // Reads that are marked to leave the L2 cache first take 40 registers more. With them, fewer of
    // the narrow cubes would fit on a processor.
    let fleeting = comptime!(blueprint.planes >= PLANES);
    // Reads run one tile ahead, so that memory is never idle while a tile is multiplied.
    let mut k = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * pieces));
    let mut own = TileSlots::<N>::room(rows);
    let indexer = part.indexer.clone();
    let part_slots = PartSlots { indexer, first, end, slots, kind, staged, fleeting };
    // Read early, so that the eviction need not wait.
    let mut limit = 0i32;
    let mut newest = 0i32;
    #[comptime]
    if let ComptimeOption::Some(eviction) = eviction {
        limit = eviction.limits[kv_head];
        newest = eviction.write_slots[kv_head];
    }
    let mut tile = first + plane * MMA_KEYS;
    if tile < end {
        let lane = TileLane { tile, r, j };
        read_keys(&pool.keys, view, &part_slots, &totals, &mut k, &lane, rows);
        read_values::<N>(&pool.values, view, &part_slots, &totals, &mut own, &lane, rows);
        own.read_weights::<Vector<u32, Const<4>>>(pool, features);
    }
    let stride = stride_of(share);
    while tile < end {
        let next = tile + planes * MMA_KEYS;
        let mut next_k = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * pieces));
        let mut next_own = TileSlots::<N>::room(rows);
        let next_lane = TileLane { tile: next, r, j };
        // After the part's end, the last slot is read again; its logit is ignored.
        read_keys(&pool.keys, view, &part_slots, &totals, &mut next_k, &next_lane, rows);
        read_values::<N>(&pool.values, view, &part_slots, &totals, &mut next_own, &next_lane, rows);
        next_own.read_weights::<Vector<u32, Const<4>>>(pool, features);

        let mut dots = dots_of(&q, &k, queries.scale, rows);
        let mut logits = Array::<f32>::new(4usize);
        #[unroll]
        for u in 0..4usize {
            let mut logit = dots[u];
            if features.weighted {
                logit += own.log_weights[u];
            }
            if own.at[u] == slots {
                logit = f32::new(LOWEST_LOGIT);
                dots[u] = f32::new(LOWEST_LOGIT);
            } else {
                if comptime!(blueprint.logits != LogitsSink::None) && r < group {
                    if comptime!(blueprint.logits == LogitsSink::Global) {
                        outputs.scores[own.at[u] * group + r] = logit;
                    } else {
                        totals[sums_end + key_index(tile, u, j) - first + r * stride] = logit;
                    }
                }
            }
            logits[u] = logit;
        }
        let separate = features.numerators.comptime();
        take_values::<E, N>(&mut running, &logits, &dots, &own, j, separate, rows);
        #[unroll]
        for i in 0..comptime!(2 * pieces) {
            k[i] = next_k[i];
        }
        #[unroll]
        for i in 0..comptime!(4 * blocks) {
            own.values[i] = next_own.values[i];
        }
        #[unroll]
        for u in 0..4usize {
            if comptime!(matches!(kind, ViewKind::List | ViewKind::Sets)) {
                own.at[u] = next_own.at[u];
            } else {
                // Computing the slot again is cheaper than keeping it in a register.
                let i = key_index(next, u, j);
                let slot = part.indexer.slot(view, min(i, end - 1), slots, kind);
                own.at[u] = select(i < end, slot, slots);
            }
            if features.weighted {
                own.log_weights[u] = next_own.log_weights[u];
            }
            if features.numerators {
                own.numerators[u] = next_own.numerators[u];
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
    // A head below its limit evicts nothing.
    let mut full = part.length >= limit;
    let together = comptime!(blueprint.logits.together());
    let remembers = comptime!(blueprint.logits.remembers());
    if comptime!(together > 0) {
        full = part.sequence.full;
    }
    let candidates_of_cube = CandidateSlots {
        kv_head,
        start,
        first,
        count: select(full || remembers, end - first, 0usize),
        logits_at: sums_end.runtime(),
        stride,
        newest,
    };
    let norms = prefetch_log_norms(&*eviction, &candidates_of_cube, joined, joint);
    let mut sums = reduce_warps(&running, totals, rows, joint);
    if comptime!(blueprint.logits == LogitsSink::Shared) {
        let mut i = unit;
        while i < (end - first) * group {
            outputs.scores[(start + first) * group + i] =
                sums.totals[sums_end + i / group + i % group * stride];
            i += planes * PLANE;
        }
    }
    let cubes = blueprint.cubes().comptime();
    let received = ClusterPartials::room(cubes, joint);
    if joined {
        cluster_exchange(&received, &mut sums, split, cubes, joint);
    }

    // Messages to other cubes travel while the output is written.
    let spares = comptime!(blueprint.logits.spares_newest());
    let candidates = ClusterArgmin::room(cubes);
    let mut arrived = 0u32;
    let mut place = i32::new(NO_INDEX as i64);
    #[comptime]
    if let ComptimeOption::Some(eviction) = eviction {
        if comptime!(together > 0) {
            let active = part.sequence.full || remembers;
            if active {
                arrived =
                    publish(&sums, &norms, eviction, &candidates_of_cube, part, joined, joint);
            }
        } else {
            let (key, argmin) = argmin_importance(
                &sums,
                &norms,
                eviction,
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
        cluster_reduce::<E>(&received, &sums, &mut outputs.heads, kv_head, split, cubes, joint);
    } else {
        let is_part = comptime!(blueprint.parts == KvSplit::Global);
        write_partial::<E>(&sums, &mut outputs.heads, kv_head, cube, is_part, joint);
    }
    #[comptime]
    if let ComptimeOption::Some(eviction) = eviction {
        if comptime!(together > 0) {
            let rules =
                comptime!(TogetherRules { heads: together, spares_newest: spares, remembers });
            give_up_together(arrived, eviction, &candidates_of_cube, part, rules, joined, joint);
        } else {
            if joined {
                place = cluster_argmin(&candidates, split, cubes);
            }
            if unit == 0 && split == 0 {
                eviction.write_slots[kv_head] = next_write_slot(place, newest, full, part.length);
            }
        }
    }
}
