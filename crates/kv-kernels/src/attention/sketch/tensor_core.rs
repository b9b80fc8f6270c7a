//! The kernel for matrix instructions: f16 and bf16, 16 rows at a time in each plane of 32,
//! whatever the group.
//!
//! A plane takes its part of the slots, then its part of the tokens, as the products of decode
//! attention take them: lane `4 r + j` has keys of the rows `r` and `r + 8`, and values of the rows
//! `2 j`, `2 j + 1`, `2 j + 8` and `2 j + 9`. A token's rows are medians that the lane takes of its
//! own columns (`entries.rs`).

use cubecl::prelude::*;

use super::blueprint::{Blueprint, WORDS};
use super::entries::{hashes_of, token_keys, token_value};
use super::staging::{ENTRY, stage};
use crate::attention::decode::ViewKind;
use crate::attention::decode::blueprint::{KvSplit, MMA_KEYS};
use crate::attention::decode::mma_fragments::{key_index, read_keys, read_values};
use crate::attention::decode::products::{dots_of, nothing_yet, read_queries, take_values};
use crate::attention::decode::slot_indexer::SlotIndexer;
use crate::attention::decode::split_kv_reduce::{
    ClusterPartials, PLANE, PartialShape, cluster_exchange, cluster_reduce, reduce_warps,
    write_partial,
};
use crate::components::cluster::arrive_at_cluster;
use crate::components::sentinels::LOWEST_LOGIT;
use crate::sketch::count_sketch::HEAD_FIELDS;
use crate::sketch::revise_sketch::ABSENT;

/// Cubes have whole ranges, or parts that a kernel behind joins.
///
/// # Shapes
/// In 32-bit words: `query` `[B, Hkv, G, D / 2]`, `keys` and `values` `[S, D / 2]`. In vectors of
/// 4: `sketch_keys` and `sketch_values` `[N, D / 4]`. `slot_logits` `[S, G]`, `token_logits` `[T,
/// G]`, `output` `[B, Hkv, G, D]`, `log_sum_exp` `[B, Hkv, G]`. Where the range is split: `partial`
/// `[B, Hkv, splits, G, D]`, `stats` `[B, Hkv, splits, G, 2]` (maximum, sum).
#[cube(launch_unchecked, fast_math = FastMath::ReducedPrecision.into())]
#[allow(clippy::too_many_arguments)]
pub(super) fn tile_kernel<E: Float>(
    query: &[Vector<u32, Const<2>>],
    keys: &[Vector<u32, Const<4>>],
    values: &[Vector<u32, Const<WORDS>>],
    offsets: &[i32],
    lengths: &[i32],
    sketch_keys: &[Vector<f32, Const<ENTRY>>],
    sketch_values: &[Vector<f32, Const<ENTRY>>],
    heads: &[i32],
    hashes: &[i32],
    scores: &[f32],
    newest: &[i32],
    output: &mut [E],
    log_sum_exp: &mut [f32],
    slot_logits: &mut [f32],
    token_logits: &mut [f32],
    partial: &mut [f32],
    stats: &mut [f32],
    total_kv_heads: usize,
    kv_heads: usize,
    splits: usize,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    attend::<E>(
        query,
        keys,
        values,
        offsets,
        lengths,
        sketch_keys,
        sketch_values,
        heads,
        hashes,
        scores,
        newest,
        output,
        log_sum_exp,
        slot_logits,
        token_logits,
        partial,
        stats,
        total_kv_heads,
        kv_heads,
        splits,
        scale,
        blueprint,
    );
}

/// The same, where the cubes of a cluster have the parts of a range.
///
/// # Shapes
/// As for [`tile_kernel`].
#[cube(
    launch_unchecked,
    fast_math = FastMath::ReducedPrecision.into(),
    cluster_dim = CubeDim::new_1d(blueprint.cubes() as u32)
)]
#[allow(clippy::too_many_arguments)]
pub(super) fn joined_kernel<E: Float>(
    query: &[Vector<u32, Const<2>>],
    keys: &[Vector<u32, Const<4>>],
    values: &[Vector<u32, Const<WORDS>>],
    offsets: &[i32],
    lengths: &[i32],
    sketch_keys: &[Vector<f32, Const<ENTRY>>],
    sketch_values: &[Vector<f32, Const<ENTRY>>],
    heads: &[i32],
    hashes: &[i32],
    scores: &[f32],
    newest: &[i32],
    output: &mut [E],
    log_sum_exp: &mut [f32],
    slot_logits: &mut [f32],
    token_logits: &mut [f32],
    partial: &mut [f32],
    stats: &mut [f32],
    total_kv_heads: usize,
    kv_heads: usize,
    splits: usize,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    attend::<E>(
        query,
        keys,
        values,
        offsets,
        lengths,
        sketch_keys,
        sketch_values,
        heads,
        hashes,
        scores,
        newest,
        output,
        log_sum_exp,
        slot_logits,
        token_logits,
        partial,
        stats,
        total_kv_heads,
        kv_heads,
        splits,
        scale,
        blueprint,
    );
}

/// What a cube does of a range, of which it has one of `splits` parts.
///
/// # Shapes
/// As for [`tile_kernel`].
#[cube]
#[allow(clippy::too_many_arguments)]
fn attend<E: Float>(
    query: &[Vector<u32, Const<2>>],
    keys: &[Vector<u32, Const<4>>],
    values: &[Vector<u32, Const<WORDS>>],
    offsets: &[i32],
    lengths: &[i32],
    sketch_keys: &[Vector<f32, Const<ENTRY>>],
    sketch_values: &[Vector<f32, Const<ENTRY>>],
    heads: &[i32],
    hashes: &[i32],
    scores: &[f32],
    newest: &[i32],
    output: &mut [E],
    log_sum_exp: &mut [f32],
    slot_logits: &mut [f32],
    token_logits: &mut [f32],
    partial: &mut [f32],
    stats: &mut [f32],
    total_kv_heads: usize,
    kv_heads: usize,
    splits: usize,
    scale: f32,
    #[comptime] blueprint: Blueprint,
) {
    let (group, dim, planes) = comptime!((blueprint.group, blueprint.head_dim, blueprint.planes));
    let rows = comptime!(blueprint.rows());
    let (pieces, blocks) = comptime!((rows.pieces(), rows.blocks()));

    let cube = CUBE_POS;
    if cube >= total_kv_heads * splits {
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
    let q = read_queries::<E>(query, kv_head, r, j, group, rows);
    let mut running = nothing_yet(rows);
    let mut totals = Shared::<[f32]>::new_slice(comptime!(planes * group * dim));

    // The slots. All are attended to, as they lie: neither a view nor places are looked at, and no
    // slot is the last.
    let slots = u32::MAX as usize;
    let indexer =
        SlotIndexer::new(offsets, offsets, lengths, kv_head, 0usize, 0usize, ViewKind::All);
    let (first, end) = of_cube(indexer.count, split, splits);
    let (first, end) = of_plane(first, end, plane, planes);
    let mut tile = first;
    while tile < end {
        let mut k = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * pieces));
        let mut v = Array::<Vector<u32, Const<WORDS>>>::new(comptime!(4 * blocks));
        let mut at = Array::<usize>::new(4usize);
        let (kind, listed) = comptime!((ViewKind::All, false));
        read_keys(
            keys, offsets, &totals, &mut k, tile, end, &indexer, 0usize, slots, r, j, pieces, kind,
            listed,
        );
        read_values::<Const<WORDS>>(
            values, offsets, &totals, &mut v, &mut at, tile, end, &indexer, 0usize, slots, r, j,
            blocks, WORDS, true, kind, listed,
        );
        let mut logits = dots_of(&q, &k, scale, rows);
        #[unroll]
        for u in 0..4usize {
            let live = at[u] < slots;
            if live && r < group {
                slot_logits[at[u] * group + r] = logits[u];
            }
            logits[u] = select(live, logits[u], f32::new(LOWEST_LOGIT));
        }
        take_values::<E, Const<WORDS>>(&mut running, &logits, &logits, &logits, &v, j, false, rows);
        tile += MMA_KEYS;
    }

    // The tokens in the sketch.
    let head = kv_head * HEAD_FIELDS;
    let first_entry = heads[head] as usize;
    let entries = heads[head + 1] as usize;
    let first_token = heads[head + 2] as usize;
    let last = min(newest[kv_head / kv_heads] + 1i32, heads[head + 3]);
    let mut count = max(last, 0i32) as usize;
    if entries == 0 {
        count = 0usize.runtime();
    }
    let (first, end) = of_cube(count, split, splits);
    let staged = select(first < end, entries, 0usize);
    let columns = stage::<E>(sketch_keys, sketch_values, first_entry, staged, r, j, blueprint);
    let (first, end) = of_plane(first, end, plane, planes);
    let mut turn = first;
    let mut score = score_of(scores, first_token, turn + lane, end);
    while turn < end {
        let staged_slots =
            hashes_of(hashes, kv_head, turn + lane, entries, score >= 0.0f32, blueprint);
        score = score_of(scores, first_token, turn + PLANE + lane, end);
        for half in 0..comptime!(PLANE / MMA_KEYS) {
            let tile = turn + half * MMA_KEYS;
            if tile < end {
                let asked = half * MMA_KEYS;
                let k =
                    token_keys::<E>(&columns, sketch_keys, &staged_slots, asked, r, j, blueprint);
                let mut logits = dots_of(&q, &k, scale, rows);
                let mut v = Array::<Vector<u32, Const<WORDS>>>::new(comptime!(4 * blocks));
                let mut signs = Array::<f32>::new(4usize);
                #[unroll]
                for u in 0..4usize {
                    let i = key_index(asked, u, j);
                    let (sign, live) = token_value::<E>(
                        &columns,
                        sketch_values,
                        &staged_slots,
                        &mut v,
                        i,
                        u,
                        r,
                        j,
                        blueprint,
                    );
                    signs[u] = sign;
                    if comptime!(blueprint.sketch.signed_keys) {
                        logits[u] *= sign;
                    }
                    if live && r < group {
                        token_logits[(first_token + turn + i) * group + r] = logits[u];
                    }
                    logits[u] = select(live, logits[u], f32::new(LOWEST_LOGIT));
                }
                // Signs are numerators.
                take_values::<E, Const<WORDS>>(
                    &mut running,
                    &logits,
                    &logits,
                    &signs,
                    &v,
                    j,
                    true,
                    rows,
                );
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
    let (mut maxima, mut weights) = reduce_warps(&running, &mut totals, rows, joint);
    if joined {
        let cubes = blueprint.cubes().comptime();
        let received = ClusterPartials::room(cubes, joint);
        cluster_exchange(&received, &totals, &mut maxima, &mut weights, split, cubes, joint);
        cluster_reduce::<E>(
            &received,
            &maxima,
            &weights,
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
            &maxima,
            &weights,
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
}

/// A cube's part of `count` rows.
#[cube]
fn of_cube(count: usize, split: usize, splits: usize) -> (usize, usize) {
    let share = count.div_ceil(splits);
    let first = min(split * share, count);
    (first, min(first + share, count))
}

/// What a plane takes of its cube's rows: whole tiles.
#[cube]
fn of_plane(first: usize, end: usize, plane: usize, #[comptime] planes: usize) -> (usize, usize) {
    let share = (end - first).div_ceil(comptime!(planes * MMA_KEYS)) * MMA_KEYS;
    let own = min(first + plane * share, end);
    (own, min(own + share, end))
}

/// A token's score; negative where it is not in the sketch.
#[cube]
fn score_of(scores: &[f32], first: usize, token: usize, end: usize) -> f32 {
    let mut score = f32::new(ABSENT);
    if token < end {
        score = scores[first + token];
    }
    score
}
