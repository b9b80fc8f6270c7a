//! The portable kernel of `balance`, with one cube a block and one unit a token. `tensor_core.rs`
//! makes the products by matrix instructions.
//!
//! The Gram matrix is never whole. It is made in strips: 32 tokens against all later tokens, where
//! each unit keeps the column of its own token in registers. When a token's sign is known, the
//! units of all later tokens add it to their sums. So a token's sum is complete when its turn
//! comes, and nothing is reduced. One unit decides, and all units read the sign. Where several
//! tokens get one sign, the unit of the first one adds their sums up.

use cubecl::prelude::*;

use super::walk::{
    BlockClasses, Centres, Outcome, TokenLists, WalkRules, block_of, factors_of, finish, joined,
    sign_of, span_of,
};
use crate::components::pool::Pool;
use crate::components::sentinels::LOWEST_LOGIT;

/// Tokens of a strip.
const STRIP: usize = 32;
/// Vectors of a strip's rows in shared memory at a time.
const CHUNK: usize = 8;
/// Tokens of a strip whose turns a GPU's kernel unrolls. Compilers take seconds for all of a
/// strip's.
pub(super) const TURNS: usize = 8;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    /// Tokens of a block, and units of a cube.
    pub(super) block: usize,
    /// Tokens that get one sign.
    pub(super) span: usize,
    /// Vectors of a row.
    pub(super) columns: usize,
    /// Tokens of a strip whose turns are unrolled, a divisor of [`STRIP`].
    pub(super) turns: usize,
    pub(super) centred: bool,
    pub(super) valued: bool,
    pub(super) weighted: bool,
    pub(super) seeded: bool,
    pub(super) halves: bool,
}

/// Splits a block by one cube. Rows are read in vectors of `N`.
#[cube(launch_unchecked)]
pub(super) fn plain_kernel<F: Float, N: Size>(
    pool: &Pool<Vector<F, N>, Vector<F, N>>,
    lists: &TokenLists,
    centres: &Centres<Vector<f32, N>>,
    rules: &WalkRules,
    classes: &mut BlockClasses,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let block = blueprint.block.comptime();
    let span = blueprint.span.comptime();
    let columns = blueprint.columns.comptime();
    let turns = blueprint.turns.comptime();
    let longest = lists.longest;
    let blocks = longest.div_ceil(block.runtime());
    let cube = CUBE_POS;
    if cube >= lists.rows * blocks {
        terminate!();
    }
    let (row, index) = (cube / blocks, cube % blocks);
    let unit = UNIT_POS as usize;
    let first = index * block;
    let token = block_of(lists, rules, row, first, block, blueprint.seeded);
    let (tokens, slot) = (token.tokens, token.slot);
    let mut mean = 0usize;
    if comptime!(blueprint.centred) {
        mean = (row * centres.centres + index % centres.centres) * columns;
    }

    // Tokens before the span of this unit's token.
    let earlier = min(span_of(unit, tokens, span).0, tokens);
    // Σ K_ij η_i over these tokens, without its factor exp(top).
    let mut sum = 0.0f32;
    let mut top = f32::new(LOWEST_LOGIT);
    let mut failing = 0i32;
    let mut sign = 0i32;
    // The sign of the span whose turn it is.
    let mut theirs = 0i32;
    // Tokens of either class so far, and those of this unit's class before its token.
    let mut positives = 0i32;
    let mut negatives = 0i32;
    let mut before = 0i32;
    let half = tokens.div_ceil(2) as i32;
    let gamma = rules.log_gamma[row];

    let mut strip = Shared::<[Vector<f32, N>]>::new_slice(comptime!(STRIP * CHUNK));
    let mut factors = Shared::<[f32]>::new_slice(STRIP);
    let mut chosen = Shared::<[i32]>::new_slice(STRIP);
    let mut sums = Shared::<[f32]>::new_slice(span);
    let mut tops = Shared::<[f32]>::new_slice(span);
    let mut start = 0usize;
    while start < tokens {
        // All units have read the last strip's factors.
        sync_cube();
        if comptime!(blueprint.weighted) && unit >= start && unit < start + STRIP {
            factors[unit - start] = 0.0f32;
            if unit < tokens {
                factors[unit - start] = rules.weights[row * longest + first + unit];
            }
        }
        let mut terms = Array::<f32>::new(STRIP);
        let at = StripRows { list: row * longest + first, start, tokens, slot, mean };
        let means = &centres.means;
        let shape = comptime!(StripShape { units: block, columns, centred: blueprint.centred });
        products(&pool.keys, &lists.slots, means, &mut strip, &mut terms, &at, shape);
        let mut highest = top;
        #[unroll]
        for i in 0..STRIP {
            terms[i] *= rules.scale;
            if start + i < earlier {
                highest = max(highest, terms[i]);
            }
        }
        let mut likeness = Array::<f32>::new(STRIP);
        if comptime!(blueprint.valued) {
            let shape = comptime!(StripShape { units: block, columns, centred: false });
            products(&pool.values, &lists.slots, means, &mut strip, &mut likeness, &at, shape);
        }
        let mut weight = 1.0f32;
        if comptime!(blueprint.weighted) {
            sync_cube();
            if unit < tokens {
                weight = rules.weights[row * longest + first + unit];
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
            factor += rules.value_offset;
            let precedes = start + i < earlier;
            terms[i] = select(precedes, factor * (terms[i] - top).exp(), 0.0f32);
        }
        let mut scales = factors_of(top, gamma);
        let mut done = 0usize;
        while done < STRIP {
            #[unroll]
            for i in 0..turns {
                let at = start + done + i;
                let (first_of_span, end) = span_of(at, tokens, span);
                if first_of_span == at && at < tokens {
                    if comptime!(span > 1) {
                        if unit >= at && unit < end {
                            sums[unit - at] = sum;
                            tops[unit - at] = top;
                        }
                        sync_cube();
                    }
                    if unit == at {
                        let mut total = sum;
                        if comptime!(span > 1) {
                            let (all, highest) = joined(&sums, &tops, end - at);
                            total = all;
                            scales = factors_of(highest, gamma);
                        }
                        let found = sign_of(total, scales.0, scales.1, token.draw);
                        let mut own = found.0;
                        failing = found.1;
                        if comptime!(blueprint.halves) {
                            let taken = select(own > 0, positives, negatives);
                            own = select(taken + (end - at) as i32 > half, -own, own);
                        }
                        chosen[done + i] = own;
                    }
                    sync_cube();
                    theirs = chosen[done + i];
                }
                if at < tokens {
                    if unit == at {
                        sign = theirs;
                        before = select(theirs > 0, positives, negatives);
                    }
                    sum += terms[i] * f32::cast_from(theirs);
                    positives += select(theirs > 0, 1i32, 0i32);
                    negatives += select(theirs > 0, 0i32, 1i32);
                }
            }
            // Registers cannot be indexed: the terms of the next turns move to the first ones.
            #[unroll]
            for i in 0..comptime!(STRIP - turns) {
                terms[i] = terms[i + turns];
            }
            done += turns;
        }
        start += STRIP;
    }

    let outcome = Outcome { sign, before, failing, positives, negatives };
    finish(classes, token, outcome, cube, longest, block, block);
}

/// The rows whose products are made.
#[derive(CubeType, Clone, Copy)]
struct StripRows {
    /// The index in the lists of the block's first token.
    list: usize,
    /// The strip's first token, counted from the block's first token.
    start: usize,
    /// Tokens of the block.
    tokens: usize,
    /// The slot of the unit's token.
    slot: usize,
    /// The index of the block's mean.
    mean: usize,
}

/// Comptime shape of a strip's products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct StripShape {
    units: usize,
    /// Vectors of a row.
    columns: usize,
    centred: bool,
}

/// The products of a unit's row with the rows of a strip, after both are centred.
#[cube]
fn products<F: Float, N: Size>(
    pool: &[Vector<F, N>],
    lists: &[i32],
    means: &[Vector<f32, N>],
    strip: &mut Shared<[Vector<f32, N>]>,
    dots: &mut Array<f32>,
    at: &StripRows,
    #[comptime] shape: StripShape,
) {
    let StripShape { units, columns, centred } = shape;
    let (start, tokens, slot, mean) = (at.start, at.tokens, at.slot, at.mean);
    let list = at.list;
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
        // The tokens of units before the strip have their signs already.
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
