//! The portable kernel: a cube a block, a unit a token.
//!
//! The Gram matrix is never whole: it is made in strips of 32 tokens against all behind them, which
//! each unit keeps of its own token in registers. A token's sign is known when the units behind
//! have added the signs of all before it to their sums, so nothing is reduced; a step of the walk
//! is one unit's decision that everybody reads.

use cubecl::prelude::*;

use super::walk::{Outcome, block_of, factors_of, finish, sign_of};
use crate::components::sentinels::LOWEST_LOGIT;

/// Tokens of a strip.
const STRIP: usize = 32;
/// Vectors of a row that a strip has in shared memory at a time.
const CHUNK: usize = 8;

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    /// Tokens of a block, the units of a cube.
    pub(super) block: usize,
    /// Vectors of a row.
    pub(super) columns: usize,
    pub(super) centred: bool,
    pub(super) valued: bool,
    pub(super) weighted: bool,
    pub(super) seeded: bool,
    pub(super) halves: bool,
}

/// # Shapes
/// In vectors of `N`: `keys`, `values` `[S, columns]`, `means` `[P, centres, columns]`. `lists`,
/// `weights`, `numbers` and `signs` `[P, longest]`, `counts` and `log_gamma` `[P]`, `seeds`
/// `[P, 2]`, `kept` `[P, longest / 2]`, `failed` `[P, blocks]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn plain_kernel<F: Float, N: Size>(
    keys: &[Vector<F, N>],
    values: &[Vector<F, N>],
    lists: &[i32],
    counts: &[i32],
    log_gamma: &[f32],
    means: &[Vector<f32, N>],
    weights: &[f32],
    seeds: &[i32],
    numbers: &[f32],
    signs: &mut [i32],
    kept: &mut [i32],
    failed: &mut [i32],
    rows: usize,
    longest: usize,
    centres: usize,
    scale: f32,
    value_offset: f32,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let block = blueprint.block.comptime();
    let columns = blueprint.columns.comptime();
    let blocks = longest.div_ceil(block.runtime());
    let cube = CUBE_POS;
    if cube >= rows * blocks {
        terminate!();
    }
    let (row, index) = (cube / blocks, cube % blocks);
    let unit = UNIT_POS as usize;
    let first = index * block;
    let index_in_list =
        block_of(lists, counts, seeds, numbers, row, first, longest, block, blueprint.seeded);
    let (tokens, slot) = (index_in_list.tokens, index_in_list.slot);
    let mut mean = 0usize;
    if comptime!(blueprint.centred) {
        mean = (row * centres + index % centres) * columns;
    }

    // Σ K_ij η_i over the tokens before, without the factor exp(top).
    let mut sum = 0.0f32;
    let mut top = f32::new(LOWEST_LOGIT);
    let mut failing = 0i32;
    let mut sign = 0i32;
    // Tokens of either class, among all so far and among those before this unit's.
    let mut positives = 0i32;
    let mut negatives = 0i32;
    let mut before = 0i32;
    let half = tokens.div_ceil(2) as i32;
    let gamma = log_gamma[row];

    let mut strip = Shared::<[Vector<f32, N>]>::new_slice(comptime!(STRIP * CHUNK));
    let mut factors = Shared::<[f32]>::new_slice(STRIP);
    let mut chosen = Shared::<[i32]>::new_slice(STRIP);
    let mut start = 0usize;
    while start < tokens {
        // Nobody still reads the last strip's factors.
        sync_cube();
        if comptime!(blueprint.weighted) && unit >= start && unit < start + STRIP {
            factors[unit - start] = 0.0f32;
            if unit < tokens {
                factors[unit - start] = weights[row * longest + first + unit];
            }
        }
        let mut terms = Array::<f32>::new(STRIP);
        products(
            keys,
            lists,
            means,
            &mut strip,
            &mut terms,
            row * longest + first,
            start,
            tokens,
            slot,
            mean,
            block,
            columns,
            blueprint.centred,
        );
        let mut highest = top;
        #[unroll]
        for i in 0..STRIP {
            terms[i] *= scale;
            if start + i < min(unit, tokens) {
                highest = max(highest, terms[i]);
            }
        }
        let mut likeness = Array::<f32>::new(STRIP);
        if comptime!(blueprint.valued) {
            products(
                values,
                lists,
                means,
                &mut strip,
                &mut likeness,
                row * longest + first,
                start,
                tokens,
                slot,
                mean,
                block,
                columns,
                false,
            );
        }
        let mut weight = 1.0f32;
        if comptime!(blueprint.weighted) {
            sync_cube();
            if unit < tokens {
                weight = weights[row * longest + first + unit];
            }
        }
        sum *= (top - highest).exp();
        top = highest;
        #[unroll]
        for i in 0..STRIP {
            let mut factor = 1.0f32;
            if comptime!(blueprint.valued) {
                factor = likeness[i];
            }
            if comptime!(blueprint.weighted) {
                factor *= weight * factors[i];
            }
            factor += value_offset;
            let precedes = start + i < min(unit, tokens);
            terms[i] = select(precedes, factor * (terms[i] - top).exp(), 0.0f32);
        }
        let scales = factors_of(top, gamma);
        #[unroll]
        for i in 0..STRIP {
            if unit == start + i && unit < tokens {
                let found = sign_of(sum, scales.0, scales.1, index_in_list.draw);
                sign = found.0;
                failing = found.1;
                if comptime!(blueprint.halves) {
                    let taken = select(sign > 0, positives, negatives);
                    sign = select(taken == half, -sign, sign);
                }
                before = select(sign > 0, positives, negatives);
                chosen[i] = sign;
            }
            sync_cube();
            if start + i < tokens {
                let theirs = chosen[i];
                sum += terms[i] * f32::cast_from(theirs);
                positives += select(theirs > 0, 1i32, 0i32);
                negatives += select(theirs > 0, 0i32, 1i32);
            }
        }
        start += STRIP;
    }

    let outcome = Outcome { sign, before, failing, positives, negatives };
    finish(signs, kept, failed, index_in_list, outcome, cube, longest, block, block);
}

/// Products of a unit's row with the rows of a strip; the rows are centred first.
#[cube]
#[allow(clippy::too_many_arguments)]
fn products<F: Float, N: Size>(
    pool: &[Vector<F, N>],
    lists: &[i32],
    means: &[Vector<f32, N>],
    strip: &mut Shared<[Vector<f32, N>]>,
    dots: &mut Array<f32>,
    list: usize,
    start: usize,
    tokens: usize,
    slot: usize,
    mean: usize,
    #[comptime] units: usize,
    #[comptime] columns: usize,
    #[comptime] centred: bool,
) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..STRIP {
        dots[i] = 0.0f32;
    }
    let mut chunk = 0usize;
    while chunk < columns {
        sync_cube();
        #[unroll]
        for turn in 0..comptime!((STRIP * CHUNK).div_ceil(units)) {
            let at = turn * units + unit;
            let (token, column) = (start + at / CHUNK, chunk + at % CHUNK);
            if at < comptime!(STRIP * CHUNK) {
                let mut vector = Vector::<f32, N>::new(0.0f32);
                if token < tokens && column < columns {
                    let other = lists[list + token] as usize;
                    vector = Vector::cast_from(pool[other * columns + column]);
                    if centred {
                        vector -= means[mean + column];
                    }
                }
                strip[at] = vector;
            }
        }
        sync_cube();
        // Units before the strip have their signs.
        if unit > start && unit < tokens {
            for c in 0..CHUNK {
                let column = chunk + c;
                let mut own = Vector::<f32, N>::new(0.0f32);
                if column < columns {
                    own = Vector::cast_from(pool[slot * columns + column]);
                    if centred {
                        own -= means[mean + column];
                    }
                }
                #[unroll]
                for i in 0..STRIP {
                    let other = strip[i * CHUNK + c];
                    let mut dot = dots[i];
                    #[unroll]
                    for lane in 0..N::value() {
                        dot += own.extract(lane) * other.extract(lane);
                    }
                    dots[i] = dot;
                }
            }
        }
        chunk += CHUNK;
    }
}
