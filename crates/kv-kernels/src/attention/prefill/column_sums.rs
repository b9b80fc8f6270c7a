//! Column sums of causal attention on Hopper: how much attention each key gets. The queries'
//! log-sum-exps must be known, so this kernel runs after `hopper.rs` and computes each logit again.
//! It multiplies keys (rows) by queries (columns), so that a key's sum stays in its registers. One
//! plane copies, and two groups of four planes hold 64 keys each.

// The compiler does not see that PTX writes variables.
#![allow(unused_assignments)]

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

use super::hopper::{Blueprint, KEYS, Prompt, QUERIES, STAGES, TILE_BYTES, View, start_of};
use crate::components::ptx::exp2;
use crate::components::sentinels::UNCOUNTED_LOG_SUM;
use crate::components::tma::{
    arrive, arrive_expecting, copy_tile_of, init_barrier, publish_barriers, wait_barrier,
};

/// Column sums, and what they are computed from.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ColumnSums {
    /// Log-sum-exp of each query, `[B * Hq, N]`.
    log_sum_exp: Box<[f32]>,
    /// The column sums, `[B * Hq, T]`.
    sums: Box<[f32]>,
    /// How many of the last queries count.
    counted: u32,
    /// Tiles of keys that a cube takes; 1 where a cube takes all queries that see its keys.
    tiles_each: u32,
}

/// Computes `sums[t] = Σ exp(scale · q · k_t − log_sum_exp[q])`, summed over the counted queries
/// that see key `t`.
///
/// A cube keeps one tile of keys and takes tiles of queries one after another. Where `few` queries
/// count, at most one tile, a cube keeps these and takes tiles of keys.
///
/// # Shapes
/// `q` `[B * Hq, N, D]`, `k` `[B * Hkv, T, D]`.
#[cube(launch_unchecked, fast_math = FastMath::ReducedPrecision.into())]
pub(super) fn column_sums_kernel<E: Float>(
    q: &TensorMap<E, Tiled>,
    k: &TensorMap<E, Tiled>,
    column_sums: &mut ColumnSums,
    prompt: &Prompt,
    #[comptime] few: bool,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    let tiles = blueprint.tiles.comptime();
    let logits_text = blueprint.logits.comptime();
    let bytes = comptime!(tiles as u32 * TILE_BYTES);
    let words = comptime!(bytes as usize / 4);
    let held = Shared::<[u32]>::new_aligned_slice(words, 1024usize);
    let ring = Shared::<[u32]>::new_aligned_slice(comptime!(STAGES * words), 1024usize);
    // Twice as many as tiles: a plane that still reads a step's shifts may be one step behind the
    // planes that have left the step's tile.
    let mut shifts = Shared::<[Vector<f32, Const<2>>]>::new_slice(comptime!(STAGES * QUERIES));
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(1 + 2 * STAGES), 16usize);
    let held_base = generic_to_shared::<u32>(held.as_ptr());
    let ring_base = generic_to_shared::<u32>(ring.as_ptr());
    let held_full = generic_to_shared::<u64>(barriers.as_ptr());
    let full = held_full + 8u32;
    let empty = held_full + comptime!(8 + 8 * STAGES as u32);
    if UNIT_POS == 0 {
        init_barrier(held_full, 1u32);
        #[unroll]
        for stage in 0..comptime!(STAGES as u32) {
            // One arrival for the copies, and one for each lane that writes shifts.
            init_barrier(full + comptime!(8 * stage), 33u32);
            init_barrier(empty + comptime!(8 * stage), 8u32);
        }
        publish_barriers();
    }
    sync_cube();

    let (queries, keys) = (prompt.queries, prompt.keys);
    let (window, sinks) = (prompt.window, prompt.sinks);
    let tiles_each = column_sums.tiles_each;
    // Heads follow one another; the keys that many queries see come first.
    let blocks = keys.div_ceil(comptime!(KEYS as u32));
    let parts = blocks.div_ceil(tiles_each);
    let head = CUBE_POS_X / parts;
    let block = CUBE_POS_X % parts * tiles_each;
    let own_token = block * comptime!(KEYS as u32);
    let kv_head = head / prompt.group;
    let offset = keys - queries;
    let least = queries - min(column_sums.counted, queries);
    // Begins at the first query that sees the first key.
    let from = select(few.runtime(), least, max(max(own_token, offset) - offset, least));
    let mut steps = min(tiles_each, blocks - block);
    if comptime!(!few) {
        let to = last_seeing(own_token, queries, offset, window, sinks, comptime!(blueprint.view));
        steps = (max(to, from) - from).div_ceil(comptime!(QUERIES as u32));
    }
    // How far a step moves on, in queries and in keys.
    let queries_on = comptime!(if few { 0 } else { QUERIES as u32 });
    let keys_on = comptime!(if few { KEYS as u32 } else { 0 });

    if UNIT_POS >= 256 {
        let lane = UNIT_POS % 32;
        let map_q = tensor_map_address(q);
        let map_k = tensor_map_address(k);
        if lane == 0 {
            arrive_expecting(held_full, bytes.runtime());
            #[unroll]
            for tile in 0..comptime!(tiles as u32) {
                let to = held_base + comptime!(tile * TILE_BYTES);
                let x = comptime!(64 * tile).runtime();
                if few {
                    copy_tile_of(to, map_q, x, from, head, held_full);
                } else {
                    copy_tile_of(to, map_k, x, own_token, kv_head, held_full);
                }
            }
        }
        let mut stage = 0u32;
        let mut parity = 1u32;
        for step in 0..steps {
            wait_barrier(empty + 8 * stage, parity);
            let first = from + step * queries_on;
            if lane == 0 {
                arrive_expecting(full + 8 * stage, bytes.runtime());
                #[unroll]
                for tile in 0..comptime!(tiles as u32) {
                    let to = ring_base + stage * bytes + comptime!(tile * TILE_BYTES);
                    let x = comptime!(64 * tile).runtime();
                    if few {
                        let token = own_token + step * keys_on;
                        copy_tile_of(to, map_k, x, token, kv_head, full + 8 * stage);
                    } else {
                        copy_tile_of(to, map_q, x, first, head, full + 8 * stage);
                    }
                }
            }
            #[unroll]
            for part in 0..comptime!(QUERIES / 64) {
                let pair = lane + comptime!(32 * part as u32);
                let mut shift = Vector::<f32, Const<2>>::new(UNCOUNTED_LOG_SUM);
                #[unroll]
                for e in 0..2usize {
                    let query = first + 2 * pair + comptime!(e as u32);
                    if query >= least && query < queries {
                        let sum = column_sums.log_sum_exp[(head * queries + query) as usize];
                        shift.insert(e, sum * std::f32::consts::LOG2_E);
                    }
                }
                shifts[(shifts_of(step) + pair) as usize] = shift;
            }
            arrive(full + 8 * stage);
            stage += 1;
            if stage == comptime!(STAGES as u32) {
                stage = 0u32;
                parity ^= 1u32;
            }
        }
    } else {
        let part = UNIT_POS / 128;
        let lane = UNIT_POS % 32;
        let j = lane % 4;
        // Exponentials are computed as powers of two.
        let scale = prompt.scale * std::f32::consts::LOG2_E;
        let mut sum = Array::<f32>::new(2usize);
        sum[0] = 0.0f32;
        sum[1] = 0.0f32;
        wait_barrier(held_full, 0u32);
        let mut stage = 0u32;
        let mut parity = 0u32;
        for step in 0..steps {
            let first = from + step * queries_on;
            let token = own_token + part * 64 + step * keys_on;
            let tile = ring_base + stage * bytes;
            let k_base = select(few.runtime(), tile, held_base);
            let q_base = select(few.runtime(), held_base, tile);
            let of_k = ((k_base + part * 8192) >> 4u32) | 0x1_0000u32;
            let of_q = (q_base >> 4u32) | 0x1_0000u32;
            wait_barrier(full + 8 * stage, parity);
            let mut s = Vector::<f32, Const<64>>::empty();
            gpu_asm!(
                "{{\n// {s} {k} {q}\n{logits_text}}}",
                s = out(_) s, k = in(_) of_k, q = in(_) of_q
            );
            if lane == 0 {
                arrive(empty + 8 * stage);
            }

            // This lane holds the keys `row` and `row + 8`.
            let row = token + UNIT_POS % 128 / 32 * 16 + lane / 4;
            // Whether all queries of the tile see all keys of the group.
            let mut whole = token + 63 <= offset + first;
            if comptime!(blueprint.view != View::All) {
                let last = offset + first + comptime!(QUERIES as u32 - 1);
                whole = whole && start_of(last, window, comptime!(blueprint.view)) <= token;
            }
            if !whole {
                #[unroll]
                for i in 0..64usize {
                    let query =
                        offset + first + comptime!(8 * (i / 4) as u32 + (i % 2) as u32) + 2 * j;
                    let key = row + comptime!(8 * (i % 4 / 2) as u32);
                    let mut seen = key <= query;
                    if comptime!(blueprint.view != View::All) {
                        let start = start_of(query, window, comptime!(blueprint.view));
                        seen = seen && (key >= start || key < sinks);
                    }
                    if !seen {
                        s.insert(i, f32::new(-UNCOUNTED_LOG_SUM));
                    }
                }
            }
            #[unroll]
            for b in 0..16usize {
                let shift = shifts[(shifts_of(step) + comptime!(4 * b as u32) + j) as usize];
                #[unroll]
                for e in 0..2usize {
                    #[unroll]
                    for half in 0..2usize {
                        let logit = s.extract(comptime!(4 * b + 2 * half + e));
                        sum[half] += exp2(logit * scale - shift.extract(e));
                    }
                }
            }
            if comptime!(few) {
                write(&mut sum, &mut column_sums.sums, head * keys, row, keys, j);
            }
            stage += 1;
            if stage == comptime!(STAGES as u32) {
                stage = 0u32;
                parity ^= 1u32;
            }
        }
        if comptime!(!few) {
            let row = own_token + part * 64 + UNIT_POS % 128 / 32 * 16 + lane / 4;
            write(&mut sum, &mut column_sums.sums, head * keys, row, keys, j);
        }
    }
}

/// The index of a step's first shift.
#[cube]
fn shifts_of(step: u32) -> u32 {
    step % comptime!(2 * STAGES as u32) * comptime!(QUERIES as u32 / 2)
}

/// The first query after those that see any key of a tile.
#[cube]
fn last_seeing(
    token: u32,
    queries: u32,
    offset: u32,
    window: u32,
    sinks: u32,
    #[comptime] view: View,
) -> u32 {
    let mut to = queries;
    if comptime!(view == View::Last) && token >= sinks {
        let past = token + comptime!(KEYS as u32 - 1) + window;
        to = min(max(past, offset) - offset, queries);
    }
    if comptime!(view == View::From) && token >= sinks {
        // A binary search: a window's start never falls from query to query.
        let mut low = 0u32;
        let mut high = queries;
        while low < high {
            let middle = (low + high) / 2;
            if start_of(offset + middle, window, view) < token + comptime!(KEYS as u32) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        to = low;
    }
    to
}

/// Adds the parts of four lanes to the sums of keys `row` and `row + 8`, writes the sums, and sets
/// them to 0.
#[cube]
fn write(sum: &mut Array<f32>, sums: &mut [f32], at: u32, row: u32, keys: u32, j: u32) {
    #[unroll]
    for half in 0..2usize {
        let mut whole = sum[half];
        whole += plane_shuffle_xor(whole, 1u32);
        whole += plane_shuffle_xor(whole, 2u32);
        let key = row + comptime!(8 * half as u32);
        if key < keys && j == 0 {
            sums[(at + key) as usize] = whole;
        }
        sum[half] = 0.0f32;
    }
}
