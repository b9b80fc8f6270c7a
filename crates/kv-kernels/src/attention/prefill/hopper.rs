//! Causal attention on Hopper, `softmax(scale · q kᵀ) v`. One plane copies queries, keys and values
//! into shared memory by the copy engine. Two groups of four planes hold 64 queries each and
//! multiply by warpgroup instructions. Logits never leave registers, and weights go from there into
//! the second product. `blocks.rs` serves all other devices.
//!
//! Blocks of keys are taken from the diagonal backwards, so that only the first blocks need masks.

// The compiler does not see that PTX writes variables.
#![allow(unused_assignments)]

use std::sync::LazyLock;

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

use crate::components::ptx::exp2;
use crate::components::sentinels::{LOWEST_LOGIT, WEIGHTLESS_LOGIT};
use crate::components::tma::{
    arrive, arrive_expecting, copy_tile_of, init_barrier, publish_barriers, wait_barrier,
};

/// Queries of a cube.
pub(super) const QUERIES: usize = 128;
/// Keys of a step.
pub(super) const KEYS: usize = 128;
/// Units of a cube: two groups of four planes, and the plane that copies.
pub(super) const UNITS: usize = 288;
/// Tiles of keys, and of values, that are being copied or used.
pub(super) const STAGES: usize = 2;
/// Bytes of a tile of 128 rows and 64 columns.
pub(super) const TILE_BYTES: u32 = 16_384;

/// Which keys a query sees besides the sinks, and the meaning of the kernels' `window`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum View {
    /// All keys; `window` is not read.
    All,
    /// The last `window` keys.
    Last,
    /// The keys from a share of the keys so far on; `window` is the share in units of 2⁻³².
    From,
}

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    pub(super) view: View,
    /// `D / 64`.
    pub(super) tiles: usize,
    /// PTX of the product of queries and keys.
    pub(super) logits: &'static str,
    /// PTX of the product of weights and values.
    sums: &'static str,
}

impl Blueprint {
    /// The blueprint for a head dim of 64 or 128, in f16 (`half`) or bf16.
    pub(super) fn new(head_dim: usize, half: bool, view: View) -> Self {
        static TEXTS: LazyLock<Vec<[String; 2]>> = LazyLock::new(|| {
            let kinds = [(1, "bf16"), (1, "f16"), (2, "bf16"), (2, "f16")];
            kinds.map(|(tiles, name)| [logits_text(tiles, name), sums_text(tiles, name)]).into()
        });
        let tiles = head_dim / 64;
        let [logits, sums] = &TEXTS[2 * (tiles - 1) + usize::from(half)];
        Self { view, tiles, logits, sums }
    }
}

const DONE: &str = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n";

/// PTX of `$0 = $1 $2ᵀ`: 64 queries times 128 keys, or keys times queries. `$1` and `$2` are
/// descriptors of tiles in shared memory.
fn logits_text(tiles: usize, name: &str) -> String {
    let mut text = String::from(
        ".reg .pred add;\n.reg .b64 da, db;\n.reg .b32 hi;\nmov.b32 hi, 0x40000040;\n\
         mov.b64 da, {$1, hi};\nmov.b64 db, {$2, hi};\nsetp.ne.b32 add, 0, 0;\n\
         wgmma.fence.sync.aligned;\n",
    );
    for step in 0..4 * tiles {
        if step > 0 {
            // 16 columns are 32 bytes. The next 64 columns are one tile further on.
            let ahead = if step % 4 == 0 { (TILE_BYTES >> 4) - 6 } else { 2 };
            text += &format!("add.s64 da, da, {ahead};\nadd.s64 db, db, {ahead};\n");
        }
        text += &format!(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.{name}.{name} $0, da, db, add, 1, 1, 0, \
             0;\n"
        );
        if step == 0 {
            text += "setp.eq.b32 add, 0, 0;\n";
        }
    }
    text + DONE
}

/// PTX of `$0 = $1 + P $10`: 64 queries times the head dim. The weights `P` of 128 keys are in `$2`
/// to `$9`, and `$10` is the descriptor of the values' tiles.
fn sums_text(tiles: usize, name: &str) -> String {
    let registers = 32 * tiles;
    let mut text = String::from(".reg .b64 db;\n.reg .b32 hi;\nmov.b32 hi, 0x40000040;\n");
    for register in 0..registers {
        text += &format!("mov.f32 %{register}, %{};\n", registers + register);
    }
    text += "mov.b64 db, {$10, hi};\nwgmma.fence.sync.aligned;\n";
    for step in 0..KEYS / 16 {
        if step > 0 {
            // 16 rows of 128 bytes.
            text += "add.s64 db, db, 128;\n";
        }
        text += &format!(
            "wgmma.mma_async.sync.aligned.m64n{}k16.f32.{name}.{name} $0, ${}, db, 1, 1, 1, 1;\n",
            64 * tiles,
            2 + step
        );
    }
    text + DONE
}

/// A prompt's sizes, and the keys that its queries see. The last query is at the last key.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Prompt {
    /// `N`, queries of a head.
    pub(super) queries: u32,
    /// `T`, keys of a head.
    pub(super) keys: u32,
    /// `G`, query heads of a key-value head.
    pub(super) group: u32,
    /// The window, as [`View`] defines it.
    pub(super) window: u32,
    /// First keys, which all later queries see.
    pub(super) sinks: u32,
    /// The factor of `q · k`.
    pub(super) scale: f32,
}

/// Outputs of prefill attention.
#[derive(CubeType, CubeLaunch)]
pub(super) struct PromptOutputs<E: Float> {
    /// The attention output, `[B * Hq, N, D]`, in pairs.
    output: Box<[Vector<E, Const<2>>]>,
    /// Log-sum-exp of each query, `[B * Hq, N]`.
    log_sum_exp: Box<[f32]>,
}

/// # Shapes
/// `q` `[B * Hq, N, D]`, `k` and `v` `[B * Hkv, T, D]`. `NO` is `D / 2`.
#[cube(launch_unchecked, fast_math = FastMath::ReducedPrecision.into())]
pub(super) fn prefill_kernel<E: Float, NO: Size>(
    q: &TensorMap<E, Tiled>,
    k: &TensorMap<E, Tiled>,
    v: &TensorMap<E, Tiled>,
    outputs: &mut PromptOutputs<E>,
    prompt: &Prompt,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    let tiles = blueprint.tiles.comptime();
    let logits_text = blueprint.logits.comptime();
    let sums_text = blueprint.sums.comptime();
    let bytes = comptime!(tiles as u32 * TILE_BYTES);
    let words = comptime!(bytes as usize / 4);
    let q_tiles = Shared::<[u32]>::new_aligned_slice(words, 1024usize);
    let k_tiles = Shared::<[u32]>::new_aligned_slice(comptime!(STAGES * words), 1024usize);
    let v_tiles = Shared::<[u32]>::new_aligned_slice(comptime!(STAGES * words), 1024usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(1 + 4 * STAGES), 16usize);
    let q_base = generic_to_shared::<u32>(q_tiles.as_ptr());
    let k_base = generic_to_shared::<u32>(k_tiles.as_ptr());
    let v_base = generic_to_shared::<u32>(v_tiles.as_ptr());
    let q_full = generic_to_shared::<u64>(barriers.as_ptr());
    let k_full = q_full + 8u32;
    let k_empty = q_full + comptime!(8 + 8 * STAGES as u32);
    let v_full = q_full + comptime!(8 + 16 * STAGES as u32);
    let v_empty = q_full + comptime!(8 + 24 * STAGES as u32);
    if UNIT_POS == 0 {
        init_barrier(q_full, 1u32);
        #[unroll]
        for stage in 0..comptime!(STAGES as u32) {
            init_barrier(k_full + comptime!(8 * stage), 1u32);
            init_barrier(v_full + comptime!(8 * stage), 1u32);
            init_barrier(k_empty + comptime!(8 * stage), 8u32);
            init_barrier(v_empty + comptime!(8 * stage), 8u32);
        }
        publish_barriers();
    }
    sync_cube();

    let (queries, window, sinks) = (prompt.queries, prompt.window, prompt.sinks);
    // Heads follow one another; the longest rows come first.
    let blocks = queries.div_ceil(comptime!(QUERIES as u32));
    let head = CUBE_POS_X / blocks;
    let first = (blocks - 1 - CUBE_POS_X % blocks) * comptime!(QUERIES as u32);
    let kv_head = head / prompt.group;
    let offset = prompt.keys - queries;
    let last = offset + min(first + comptime!(QUERIES as u32), queries) - 1;
    let last_block = last / comptime!(KEYS as u32);
    // Blocks that the queries see: back to the window's start, then the sinks' blocks.
    let mut near = last_block + 1;
    let mut steps = near;
    if comptime!(blueprint.view != View::All) {
        let back = start_of(offset + first, window, comptime!(blueprint.view));
        near = last_block + 1 - back / comptime!(KEYS as u32);
        steps = near + min(sinks.div_ceil(comptime!(KEYS as u32)), last_block + 1 - near);
    }

    if UNIT_POS >= 256 {
        if UNIT_POS == 256 {
            let map_q = tensor_map_address(q);
            let map_k = tensor_map_address(k);
            let map_v = tensor_map_address(v);
            arrive_expecting(q_full, bytes.runtime());
            #[unroll]
            for tile in 0..comptime!(tiles as u32) {
                let to = q_base + comptime!(tile * TILE_BYTES);
                copy_tile_of(to, map_q, comptime!(64 * tile).runtime(), first, head, q_full);
            }
            let mut stage = 0u32;
            let mut parity = 1u32;
            for step in 0..steps {
                let row = key_of(step, near, last_block);
                wait_barrier(k_empty + 8 * stage, parity);
                arrive_expecting(k_full + 8 * stage, bytes.runtime());
                #[unroll]
                for tile in 0..comptime!(tiles as u32) {
                    let to = k_base + stage * bytes + comptime!(tile * TILE_BYTES);
                    let x = comptime!(64 * tile).runtime();
                    copy_tile_of(to, map_k, x, row, kv_head, k_full + 8 * stage);
                }
                wait_barrier(v_empty + 8 * stage, parity);
                arrive_expecting(v_full + 8 * stage, bytes.runtime());
                #[unroll]
                for tile in 0..comptime!(tiles as u32) {
                    let to = v_base + stage * bytes + comptime!(tile * TILE_BYTES);
                    let x = comptime!(64 * tile).runtime();
                    copy_tile_of(to, map_v, x, row, kv_head, v_full + 8 * stage);
                }
                stage += 1;
                if stage == comptime!(STAGES as u32) {
                    stage = 0u32;
                    parity ^= 1u32;
                }
            }
        }
    } else {
        let part = UNIT_POS / 128;
        let lane = UNIT_POS % 32;
        let j = lane % 4;
        // This lane holds the queries `row` and `row + 8`.
        let row = first + part * 64 + UNIT_POS % 128 / 32 * 16 + lane / 4;
        // Exponentials are computed as powers of two.
        let scale = prompt.scale * std::f32::consts::LOG2_E;
        let registers = comptime!(32 * tiles);
        let mut o = Array::<Vector<f32, NO>>::new(1usize);
        o[0] = Vector::new(0.0f32);
        let mut max = Array::<f32>::new(2usize);
        let mut sum = Array::<f32>::new(2usize);
        #[unroll]
        for half in 0..2usize {
            max[half] = f32::new(LOWEST_LOGIT);
            sum[half] = 0.0f32;
        }
        // A descriptor holds the address and the leading offset in units of 16 bytes; 8 rows are
        // 1,024 bytes.
        let of_q = ((q_base + part * 8192) >> 4u32) | 0x1_0000u32;
        wait_barrier(q_full, 0u32);
        let mut stage = 0u32;
        let mut parity = 0u32;
        for step in 0..steps {
            let token = key_of(step, near, last_block);
            wait_barrier(k_full + 8 * stage, parity);
            let of_k = ((k_base + stage * bytes) >> 4u32) | 0x1_0000u32;
            let mut s = Vector::<f32, Const<64>>::empty();
            gpu_asm!(
                "{{\n// {s} {q} {k}\n{logits_text}}}",
                s = out(_) s, q = in(_) of_q, k = in(_) of_k
            );
            if lane == 0 {
                arrive(k_empty + 8 * stage);
            }
            if token + comptime!(KEYS as u32 - 1) > offset + first + part * 64 {
                #[unroll]
                for i in 0..64usize {
                    let at = token + comptime!(8 * (i / 4) as u32 + (i % 2) as u32) + 2 * j;
                    if at > offset + row + comptime!(8 * (i % 4 / 2) as u32) {
                        s.insert(i, f32::new(LOWEST_LOGIT));
                    }
                }
            }
            if comptime!(blueprint.view != View::All) {
                // The group's last query has the latest window start.
                let least =
                    start_of(offset + first + part * 64 + 63, window, comptime!(blueprint.view));
                if token < least {
                    let upper = start_of(offset + row, window, comptime!(blueprint.view));
                    let lower = start_of(offset + row + 8, window, comptime!(blueprint.view));
                    #[unroll]
                    for i in 0..64usize {
                        let at = token + comptime!(8 * (i / 4) as u32 + (i % 2) as u32) + 2 * j;
                        let mut start = upper;
                        if comptime!(i % 4 / 2 == 1) {
                            start = lower;
                        }
                        if at < start && at >= sinks {
                            s.insert(i, f32::new(LOWEST_LOGIT));
                        }
                    }
                }
            }
            let mut shift = Array::<f32>::new(2usize);
            let mut factor = Array::<f32>::new(2usize);
            #[unroll]
            for half in 0..2usize {
                let mut top = max[half];
                #[unroll]
                for i in 0..16usize {
                    top = larger(top, s.extract(comptime!(4 * i + 2 * half)));
                    top = larger(top, s.extract(comptime!(4 * i + 2 * half + 1)));
                }
                top = larger(top, plane_shuffle_xor(top, 1u32));
                top = larger(top, plane_shuffle_xor(top, 2u32));
                factor[half] = exp2((max[half] - top) * scale);
                // Where a query has seen no key yet, masked logits must stay far below.
                shift[half] = select(top > WEIGHTLESS_LOGIT, top * scale, 0.0f32);
                sum[half] *= factor[half];
                max[half] = top;
            }
            #[unroll]
            for i in 0..64usize {
                let half = comptime!(i % 4 / 2);
                let weight = exp2(s.extract(i) * scale - shift[half]);
                sum[half] += weight;
                s.insert(i, weight);
            }
            let mut factors = Vector::<f32, NO>::empty();
            #[unroll]
            for i in 0..registers {
                factors.insert(i, factor[comptime!(i % 4 / 2)]);
            }
            wait_barrier(v_full + 8 * stage, parity);
            let of_v = ((v_base + stage * bytes) >> 4u32) | 0x400_0000u32;
            let before = o[0] * factors;
            let mut after = Vector::<f32, NO>::empty();
            let p0 = weights::<E>(s, 0usize);
            let p1 = weights::<E>(s, 8usize);
            let p2 = weights::<E>(s, 16usize);
            let p3 = weights::<E>(s, 24usize);
            let p4 = weights::<E>(s, 32usize);
            let p5 = weights::<E>(s, 40usize);
            let p6 = weights::<E>(s, 48usize);
            let p7 = weights::<E>(s, 56usize);
            gpu_asm!(
                "{{\n// {after} {before} {p0} {p1} {p2} {p3} {p4} {p5} {p6} {p7} {v}\n{sums_text}}}",
                after = out(_) after, before = in(_) before,
                p0 = in(_) p0, p1 = in(_) p1, p2 = in(_) p2, p3 = in(_) p3,
                p4 = in(_) p4, p5 = in(_) p5, p6 = in(_) p6, p7 = in(_) p7, v = in(_) of_v
            );
            o[0] = after;
            if lane == 0 {
                arrive(v_empty + 8 * stage);
            }
            stage += 1;
            if stage == comptime!(STAGES as u32) {
                stage = 0u32;
                parity ^= 1u32;
            }
        }
        #[unroll]
        for half in 0..2usize {
            sum[half] += plane_shuffle_xor(sum[half], 1u32);
            sum[half] += plane_shuffle_xor(sum[half], 2u32);
            let row = row + comptime!(8 * half as u32);
            if row < queries {
                let at = (head * queries + row) as usize;
                let share = 1.0f32 / sum[half];
                #[unroll]
                for i in 0..comptime!(registers / 4) {
                    let mut pair = Vector::<f32, Const<2>>::empty();
                    pair.insert(0usize, o[0].extract(comptime!(4 * i + 2 * half)) * share);
                    pair.insert(1usize, o[0].extract(comptime!(4 * i + 2 * half + 1)) * share);
                    outputs.output[at * registers + comptime!(4 * i) + j as usize] =
                        Vector::cast_from(pair);
                }
                if j == 0 {
                    outputs.log_sum_exp[at] =
                        (max[half] * scale) * std::f32::consts::LN_2 + sum[half].ln();
                }
            }
        }
    }
}

/// The first key of a step. Steps go from the diagonal backwards, then through the sinks' blocks.
#[cube]
fn key_of(step: u32, near: u32, last_block: u32) -> u32 {
    let mut block = last_block - step;
    if step >= near {
        block = step - near;
    }
    block * comptime!(KEYS as u32)
}

/// The first key, besides the sinks, that the query at key `at` sees.
#[cube]
pub(super) fn start_of(at: u32, window: u32, #[comptime] view: View) -> u32 {
    let mut start = 0u32;
    if comptime!(view == View::Last) {
        start = at + 1 - min(window, at + 1);
    }
    if comptime!(view == View::From) {
        // [`Share::first_seen`](crate::Share::first_seen), which counts queries and keys from 1.
        let from = window.mul_hi(at + 1);
        start = from - min(from, 1u32);
    }
    start
}

/// The weights `at..at + 8` in the registers that the second product takes.
#[cube]
fn weights<E: Float>(s: Vector<f32, Const<64>>, #[comptime] at: usize) -> Vector<u32, Const<4>> {
    let mut part = Vector::<f32, Const<8>>::empty();
    #[unroll]
    for i in 0..8usize {
        part.insert(i, s.extract(comptime!(at + i)));
    }
    Vector::<u32, Const<4>>::reinterpret(Vector::<E, Const<8>>::cast_from(part))
}

#[cube]
fn larger(a: f32, b: f32) -> f32 {
    select(b > a, b, a)
}
