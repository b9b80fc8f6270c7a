//! The kernel of `signature_scores` for matrix instructions: one plane a block, without shared
//! memory. Rows of a product are 16 slots, the summed dimension is channels, and columns are query
//! heads.
//!
//! The estimated logit is `scale Σ_c q_c (μ_c ± σ_c)`. The sum over `μ` is one number a head. The
//! sum over `± σ` is the product: a bit of a signature becomes the sign of the bf16 number 1, by a
//! shift and two operations of bits for a pair of channels, whatever the number of heads. The
//! factors `scale q_c σ_c` would lose too much in one bf16 number: a factor is the sum of two of
//! them ([`crate::components::bf16_pairs`]). A product has 8 columns, for the two numbers of 4
//! query heads.
//!
//! The order of rows and of the summed dimension is free. Lane `4 r + j` has the slots `2 r` and `2
//! r + 1` of each 16, and of each word of 32 channels the channels `4 j` to `4 j + 3` and the ones
//! 16 behind them. In products it has columns `2 j` and `2 j + 1`.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;
use half::bf16;

use super::kernel_args::{Blueprint, ScoredRanges};
use crate::archive::layout::kernel::{first_of, second_of};
use crate::archive::layout::{BLOCK, SIGNS, signature_words};
use crate::components::bf16_pairs::{lead, packed, rounded};
use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::larger;
use crate::select::scored_rows::ScoredRowBuffers;

const PLANE: usize = 32;
/// Planes of a cube.
pub(super) const PLANES: usize = 4;
/// Units of a cube.
pub(super) const UNITS: usize = PLANES * PLANE;
/// Lanes that share a row.
const TEAM: usize = 4;
/// Query heads of a product.
const HEADS: usize = 4;
/// Slots of a product.
const TILE: usize = 16;
/// Pairs of channels that a lane has of a word.
const PAIRS: usize = SIGNS / 2 / TEAM;
/// The largest head dim and group for which registers hold the factors.
pub(super) const LARGEST: usize = 256;
pub(super) const LARGEST_GROUP: usize = 2 * HEADS;

#[cube(launch_unchecked)]
pub(super) fn signature_tiles_kernel<F: Float>(
    queries: &[Vector<F, Const<4>>],
    signatures: &[Vector<u32, Const<2>>],
    statistics: &[Vector<u32, Const<4>>],
    ranges: &ScoredRanges,
    scored: &mut ScoredRowBuffers,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let Blueprint { group, head_dim } = blueprint;
    let words = comptime!(signature_words(head_dim));
    let head_tiles = comptime!(group.div_ceil(HEADS));
    let pairs = comptime!(words * PAIRS);
    let unit = UNIT_POS as usize;
    let (plane, lane) = (unit / PLANE.comptime(), unit % PLANE.comptime());
    let (r, j) = (lane / TEAM.comptime(), lane % TEAM.comptime());
    let task = CUBE_POS * PLANES.comptime() + plane;
    if task >= scored.rows * ranges.blocks {
        terminate!();
    }
    let (row, own) = (task / ranges.blocks, task % ranges.blocks);
    if own + lane == 0 {
        ranges.write_counts(row, scored);
    }
    if own * BLOCK.comptime() >= ranges.length(row, scored.columns) {
        terminate!();
    }
    let block = ranges.block(row, own);

    // All signatures are on their way before the first of them is needed.
    let mut signs = Array::<Vector<u32, Const<2>>>::new(comptime!(words * BLOCK / TILE));
    #[unroll]
    for word in 0..words {
        #[unroll]
        for tile in 0..comptime!(BLOCK / TILE) {
            let at = (block * words + word) * comptime!(BLOCK / 2) + comptime!(tile * TILE / 2) + r;
            signs[word * comptime!(BLOCK / TILE) + tile] = signatures[at];
        }
    }

    // Factors of head `r % 4`: their leading numbers in columns up to 3, their rests behind. A sign
    // bit is set where the key is above the mean, so factors are negative.
    let mut factors = Array::<u32>::new(comptime!(head_tiles * pairs));
    let mut bases = Array::<f32>::new(head_tiles);
    #[unroll]
    for n in 0..head_tiles {
        let head = comptime!(n * HEADS) + r % HEADS.comptime();
        let query = (row * group + min(head, group - 1)) * comptime!(head_dim / 4);
        let scale = select(head < group, ranges.scale, 0.0f32);
        let mut base = 0.0f32;
        #[unroll]
        for word in 0..words {
            let at = comptime!(word * SIGNS / 4) + j;
            let low = statistics[block * comptime!(head_dim / 4) + at];
            let high = statistics[block * comptime!(head_dim / 4) + at + TEAM.comptime()];
            let (q_low, q_high) = (queries[query + at], queries[query + at + TEAM.comptime()]);
            #[unroll]
            for i in 0..PAIRS {
                let (of_low, of_high) = (low.extract(i), high.extract(i));
                let a = f32::cast_from(q_low.extract(i)) * scale;
                let b = f32::cast_from(q_high.extract(i)) * scale;
                base += a * first_of(of_low) + b * first_of(of_high);
                let (a, b) = (rounded(-a * second_of(of_low)), rounded(-b * second_of(of_high)));
                let (a_lead, b_lead) = (lead(a), lead(b));
                let rest = packed(a - a_lead, b - b_lead);
                factors[comptime!((n * words + word) * PAIRS + i)] =
                    select(r < HEADS.comptime(), packed(a_lead, b_lead), rest);
            }
        }
        base += plane_shuffle_xor(base, 1u32);
        bases[n] = base + plane_shuffle_xor(base, 2u32);
    }

    // `offsets[2 n + e]` belongs to head `4 n + 2 (j % 2) + e`: the part of its logits that all of
    // a block's slots have in common, less its log-sum-exp. Below, `logits[2 (2 n + e) + slot]`.
    let mut offsets = Array::<f32>::new(comptime!(2 * head_tiles));
    #[unroll]
    for n in 0..head_tiles {
        #[unroll]
        for e in 0..2usize {
            let within = 2 * (j % 2) + e;
            let base = plane_shuffle(bases[n], (within * TEAM.comptime()) as u32);
            let head = comptime!(n * HEADS) + within;
            let log_sum = ranges.log_sum(row * group + min(head, group - 1));
            offsets[2 * n + e] = select(head < group, base - log_sum, f32::new(LOWEST_LOGIT));
        }
    }
    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    #[unroll]
    for tile in 0..comptime!(BLOCK / TILE) {
        let mut logits = Array::<f32>::new(comptime!(4 * head_tiles));
        #[unroll]
        for n in 0..head_tiles {
            let mut products = Array::<Vector<f32, Const<2>>>::new(2usize);
            products[0] = Vector::new(0.0f32);
            products[1] = Vector::new(0.0f32);
            #[unroll]
            for m in 0..comptime!(pairs / 2) {
                let mut rows = Array::<Vector<bf16, Const<2>>>::new(4usize);
                let mut column = Array::<Vector<bf16, Const<2>>>::new(2usize);
                #[unroll]
                for side in 0..2usize {
                    let pair = comptime!(2 * m + side);
                    column[side] = Vector::reinterpret(factors[comptime!(n * pairs + pair)]);
                    #[unroll]
                    for slot in 0..2usize {
                        let word =
                            signs[comptime!(pair / PAIRS * (BLOCK / TILE) + tile)].extract(slot);
                        let bits =
                            word << (comptime!(15 - pair % PAIRS) - TEAM.comptime() * j) as u32;
                        let one = bits & 0x8000_8000u32 | 0x3f80_3f80u32;
                        rows[comptime!(2 * side + slot)] = Vector::reinterpret(one);
                    }
                }
                products = def.execute(&rows, &column, &products);
            }
            #[unroll]
            for e in 0..2usize {
                #[unroll]
                for slot in 0..2usize {
                    // The two numbers of a factor are in columns of lanes `j` and `j + 2`.
                    let product = products[slot].extract(e);
                    logits[comptime!((2 * n + e) * 2 + slot)] =
                        product + plane_shuffle_xor(product, 2u32) + offsets[2 * n + e];
                }
            }
        }
        #[unroll]
        for slot in 0..2usize {
            let mut top = logits[slot];
            #[unroll]
            for h in 1..comptime!(2 * head_tiles) {
                top = larger(top, logits[comptime!(2 * h + slot)]);
            }
            top = larger(top, plane_shuffle_xor(top, 1u32));
            let mut sum = 0.0f32;
            #[unroll]
            for h in 0..comptime!(2 * head_tiles) {
                sum += (logits[comptime!(2 * h + slot)] - top).exp();
            }
            sum += plane_shuffle_xor(sum, 1u32);
            let column = own * BLOCK.comptime() + comptime!(tile * TILE + slot) + 2 * r;
            if j == slot && column < scored.columns {
                scored.scores[row * scored.columns + column] = top + sum.ln();
            }
        }
    }
}
