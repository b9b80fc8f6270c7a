//! Attention over slots and sketched tokens by matrix instructions, for f16 and bf16. Each plane of
//! 32 units takes 16 rows at a time, for all query heads of a group at once.
//!
//! A plane takes its part of the slots, then its part of the tokens, with the products of decode
//! attention. Lane `4 r + j` holds keys of the rows `r` and `r + 8`, and values of the rows `2 j`,
//! `2 j + 1`, `2 j + 8` and `2 j + 9`. A token's rows are medians, which the lane computes for its
//! own columns (`entries.rs`).

use cubecl::prelude::*;

use super::blueprint::{Blueprint, WORDS};
use super::entries::{hashes_of, token_keys, token_value};
use super::kernel_args::{SketchOutputs, SketchedTokens, SplitRanges};
use super::staging::stage;
use crate::attention::decode::ViewKind;
use crate::attention::decode::blueprint::{KvSplit, MMA_KEYS};
use crate::attention::decode::kernel_args::Queries;
use crate::attention::decode::mma_fragments::{
    PartSlots, TileLane, TileSlots, key_index, read_keys, read_values,
};
use crate::attention::decode::products::{dots_of, nothing_yet, read_queries, take_values};
use crate::attention::decode::slot_indexer::SlotIndexer;
use crate::attention::decode::split_kv_reduce::{
    ClusterPartials, PLANE, PartialShape, cluster_exchange, cluster_reduce, reduce_warps,
    write_partial,
};
use crate::components::cluster::arrive_at_cluster;
use crate::components::pool::Pool;
use crate::components::sentinels::LOWEST_LOGIT;
use crate::sketch::count_sketch::HEAD_FIELDS;
use crate::sketch::update_sketch::ABSENT;

/// Each cube takes a whole range, or a part that a later kernel combines. Queries, keys and values
/// are in 32-bit words.
#[cube(launch_unchecked, fast_math = FastMath::ReducedPrecision.into())]
pub(super) fn tile_kernel<E: Float>(
    queries: &Queries<Vector<u32, Const<2>>>,
    pool: &Pool<Vector<u32, Const<4>>, Vector<u32, Const<WORDS>>>,
    ranges: &SplitRanges,
    tokens: &SketchedTokens,
    outputs: &mut SketchOutputs<E, f32>,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    attend::<E>(queries, pool, ranges, tokens, outputs, blueprint);
}

/// [`tile_kernel`], where the cubes of a cluster take the parts of a range and join them.
#[cube(
    launch_unchecked,
    fast_math = FastMath::ReducedPrecision.into(),
    cluster_dim = CubeDim::new_1d(blueprint.cubes() as u32)
)]
pub(super) fn joined_kernel<E: Float>(
    queries: &Queries<Vector<u32, Const<2>>>,
    pool: &Pool<Vector<u32, Const<4>>, Vector<u32, Const<WORDS>>>,
    ranges: &SplitRanges,
    tokens: &SketchedTokens,
    outputs: &mut SketchOutputs<E, f32>,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    attend::<E>(queries, pool, ranges, tokens, outputs, blueprint);
}

/// Attends to one cube's part of a range, one of `splits` parts.
#[cube]
fn attend<E: Float>(
    queries: &Queries<Vector<u32, Const<2>>>,
    pool: &Pool<Vector<u32, Const<4>>, Vector<u32, Const<WORDS>>>,
    ranges: &SplitRanges,
    tokens: &SketchedTokens,
    outputs: &mut SketchOutputs<E, f32>,
    #[comptime] blueprint: Blueprint,
) {
    let (group, dim, planes) = comptime!((blueprint.group, blueprint.head_dim, blueprint.planes));
    let rows = comptime!(blueprint.rows());
    let pieces = comptime!(rows.pieces());

    let cube = CUBE_POS;
    let splits = ranges.splits;
    if cube >= ranges.total_kv_heads * splits {
        terminate!();
    }
    let joined = comptime!(matches!(blueprint.parts, KvSplit::Cluster(_)));
    if joined {
        arrive_at_cluster();
    }
    let kv_head = cube / splits;
    let split = cube % splits;
    let unit = UNIT_POS as usize;
    let (lane, plane) = (unit % PLANE, unit / PLANE);
    let (r, j) = (lane / 4, lane % 4);
    let q = read_queries::<E>(&queries.rows, kv_head, r, j, group, rows);
    let mut running = nothing_yet(rows);
    let totals = Shared::<[f32]>::new_slice(comptime!(planes * group * dim));

    // First, the exact slots: all of a range in order, without view, lists or an end of the pool.
    let slots = u32::MAX as usize;
    let (offsets, kind) = (&ranges.offsets, comptime!(ViewKind::All));
    let indexer =
        SlotIndexer::new(offsets, offsets, &ranges.lengths, kv_head, 0usize, 0usize, kind);
    let (first, end) = of_cube(indexer.count, split, splits);
    let (first, end) = of_plane(first, end, plane, planes);
    let (staged, fleeting) = comptime!((false, true));
    let part = PartSlots { indexer, first, end, slots, kind, staged, fleeting };
    let mut tile = first;
    while tile < end {
        let mut k = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * pieces));
        let mut own = TileSlots::<Const<WORDS>>::room(rows);
        let lane = TileLane { tile, r, j };
        read_keys(&pool.keys, &ranges.offsets, &part, &totals, &mut k, &lane, rows);
        read_values::<Const<WORDS>>(
            &pool.values,
            &ranges.offsets,
            &part,
            &totals,
            &mut own,
            &lane,
            rows,
        );
        let mut logits = dots_of(&q, &k, queries.scale, rows);
        #[unroll]
        for u in 0..4usize {
            let live = own.at[u] < slots;
            if live && r < group {
                outputs.slot_logits[own.at[u] * group + r] = logits[u];
            }
            logits[u] = select(live, logits[u], f32::new(LOWEST_LOGIT));
        }
        take_values::<E, Const<WORDS>>(&mut running, &logits, &logits, &own, j, false, rows);
        tile += MMA_KEYS;
    }

    // Then, the tokens in the sketch.
    let heads = &tokens.sketch.heads;
    let head = kv_head * HEAD_FIELDS;
    let first_entry = heads[head] as usize;
    let entries = heads[head + 1] as usize;
    let first_token = heads[head + 2] as usize;
    let last = min(tokens.newest[kv_head / tokens.kv_heads] + 1i32, heads[head + 3]);
    let mut count = max(last, 0i32) as usize;
    if entries == 0 {
        count = 0usize.runtime();
    }
    let (first, end) = of_cube(count, split, splits);
    let staged = select(first < end, entries, 0usize);
    let columns = stage::<E>(&tokens.sketch, first_entry, staged, r, j, blueprint);
    let (first, end) = of_plane(first, end, plane, planes);
    let mut turn = first;
    let mut score = score_of(&tokens.scores, first_token, turn + lane, end);
    while turn < end {
        let packed_entries = hashes_of(
            &tokens.sketch.hashes,
            kv_head,
            turn + lane,
            entries,
            score >= 0.0f32,
            blueprint,
        );
        score = score_of(&tokens.scores, first_token, turn + PLANE + lane, end);
        for half in 0..comptime!(PLANE / MMA_KEYS) {
            let tile = turn + half * MMA_KEYS;
            if tile < end {
                let asked = half * MMA_KEYS;
                let k = token_keys::<E>(
                    &columns,
                    &tokens.sketch.keys,
                    &packed_entries,
                    asked,
                    blueprint,
                );
                let mut logits = dots_of(&q, &k, queries.scale, rows);
                let mut own = TileSlots::<Const<WORDS>>::room(rows);
                #[unroll]
                for u in 0..4usize {
                    let i = key_index(asked, u, j);
                    let (sign, live) = token_value::<E>(
                        &columns,
                        &tokens.sketch.values,
                        &packed_entries,
                        &mut own.values,
                        i,
                        u,
                        blueprint,
                    );
                    own.numerators[u] = sign;
                    if comptime!(blueprint.sketch.signed_keys) {
                        logits[u] *= sign;
                    }
                    if live && r < group {
                        outputs.token_logits[(first_token + turn + i) * group + r] = logits[u];
                    }
                    logits[u] = select(live, logits[u], f32::new(LOWEST_LOGIT));
                }
                // A token's sign multiplies its value, so it is a numerator.
                take_values::<E, Const<WORDS>>(&mut running, &logits, &logits, &own, j, true, rows);
            }
        }
        turn += PLANE;
    }

    let joint = comptime!(PartialShape {
        group: blueprint.group,
        dim: blueprint.head_dim,
        planes: blueprint.planes,
        numerators: false,
        log_sum_exp: true,
    });
    let mut sums = reduce_warps(&running, totals, rows, joint);
    if joined {
        let cubes = blueprint.cubes().comptime();
        let received = ClusterPartials::room(cubes, joint);
        cluster_exchange(&received, &mut sums, split, cubes, joint);
        cluster_reduce::<E>(&received, &sums, &mut outputs.heads, kv_head, split, cubes, joint);
    } else {
        let is_part = comptime!(blueprint.parts == KvSplit::Global);
        write_partial::<E>(&sums, &mut outputs.heads, kv_head, cube, is_part, joint);
    }
}

/// The first and the end of a cube's part of `count` rows.
#[cube]
fn of_cube(count: usize, split: usize, splits: usize) -> (usize, usize) {
    let share = count.div_ceil(splits);
    let first = min(split * share, count);
    (first, min(first + share, count))
}

/// The first and the end of a plane's share of its cube's rows, in whole tiles.
#[cube]
fn of_plane(first: usize, end: usize, plane: usize, #[comptime] planes: usize) -> (usize, usize) {
    let share = (end - first).div_ceil(comptime!(planes * MMA_KEYS)) * MMA_KEYS;
    let own = min(first + plane * share, end);
    (own, min(own + share, end))
}

/// The score of a token, negative where the token is not in the sketch.
#[cube]
fn score_of(scores: &[f32], first: usize, token: usize, end: usize) -> f32 {
    let mut score = f32::new(ABSENT);
    if token < end {
        score = scores[first + token];
    }
    score
}
