//! The portable kernel of `signature_scores`: one cube a block, one unit a slot. The queries'
//! factors are in shared memory, four channels a vector.

use cubecl::prelude::*;

use super::kernel_args::{Blueprint, ScoredRanges};
use crate::archive::layout::kernel::{first_of, second_of};
use crate::archive::layout::{BLOCK, SIGNS, signature_words};
use crate::components::softmax::larger;
use crate::select::scored_rows::ScoredRowBuffers;

/// Channels of a vector.
const LANES: usize = 4;

#[cube(launch_unchecked)]
pub(super) fn signature_scores_kernel<F: Float>(
    queries: &[F],
    signatures: &[u32],
    statistics: &[u32],
    ranges: &ScoredRanges,
    scored: &mut ScoredRowBuffers,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let Blueprint { group, head_dim } = blueprint;
    let words = comptime!(signature_words(head_dim));
    let vectors = comptime!(words * SIGNS / LANES);
    let cube = CUBE_POS;
    if cube >= scored.rows * ranges.blocks {
        terminate!();
    }
    let (row, own) = (cube / ranges.blocks, cube % ranges.blocks);
    let unit = UNIT_POS as usize;
    if own + unit == 0 {
        ranges.write_counts(row, scored);
    }
    if own * BLOCK.comptime() >= ranges.length(row, scored.columns) {
        terminate!();
    }
    let block = ranges.block(row, own);

    let mut factors = Shared::<[Vector<f32, Const<LANES>>]>::new_slice(comptime!(group * vectors));
    let mut parts = Shared::<[f32]>::new_slice(comptime!(group * BLOCK));
    #[unroll]
    for g in 0..group {
        let query = (row * group + g) * head_dim;
        let mut part = 0.0f32;
        let mut vector = unit;
        while vector < vectors {
            let mut factor = Vector::<f32, Const<LANES>>::empty();
            #[unroll]
            for lane in 0..LANES.comptime() {
                let channel = vector * LANES.comptime() + lane;
                let mut own = 0.0f32;
                if channel < head_dim {
                    let word = statistics[block * head_dim + channel];
                    let (mean, spread) = (first_of(word), second_of(word));
                    let q = f32::cast_from(queries[query + channel]) * ranges.scale;
                    own = 2.0f32 * q * spread;
                    part += q * (mean - spread);
                }
                factor.insert(lane, own);
            }
            factors[g * vectors + vector] = factor;
            vector += BLOCK.comptime();
        }
        parts[g * BLOCK.comptime() + unit] = part;
    }
    sync_cube();
    let mut bases = Shared::<[f32]>::new_slice(group);
    if unit < group {
        let mut base = 0.0f32;
        for i in 0..BLOCK.comptime() {
            base += parts[unit * BLOCK.comptime() + i];
        }
        bases[unit] = base;
    }
    sync_cube();

    let mut odds = Array::<f32>::new(group);
    #[unroll]
    for g in 0..group {
        odds[g] = bases[g] - ranges.log_sum(row * group + g);
    }
    for word in 0..words {
        let signs = signatures[(block * words + word) * BLOCK.comptime() + unit];
        for v in 0..comptime!(SIGNS / LANES) {
            let vector = word * comptime!(SIGNS / LANES) + v;
            #[unroll]
            for g in 0..group {
                let factor = factors[g * vectors + vector];
                #[unroll]
                for lane in 0..LANES.comptime() {
                    let sign = signs >> (v * LANES.comptime() + lane) as u32 & 1u32;
                    odds[g] += select(sign == 1u32, factor.extract(lane), 0.0f32);
                }
            }
        }
    }
    let mut top = odds[0];
    #[unroll]
    for g in 1..group {
        top = larger(top, odds[g]);
    }
    let mut sum = 0.0f32;
    #[unroll]
    for g in 0..group {
        sum += (odds[g] - top).exp();
    }
    let column = own * BLOCK.comptime() + unit;
    if column < scored.columns {
        scored.scores[row * scored.columns + column] = top + sum.ln();
    }
}
