//! The kernel of `balance` for matrix instructions, f16 and bf16, in planes of 32: one cube a
//! block, one unit a token.
//!
//! A strip of the Gram matrix has 32 tokens as rows and all later tokens as columns. Each plane
//! multiplies the columns of its own 32 tokens. The products are of uncentred keys, exact in f32,
//! and are centred afterwards. One plane holds the strip's tokens and walks them alone: each sign
//! is one shuffle.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::walk::{
    BlockClasses, Centres, Outcome, TokenLists, WalkRules, block_of, factors_of, finish, sign_of,
};
use crate::components::pool::Pool;
use crate::components::sentinels::LOWEST_LOGIT;

/// Tokens of a strip, and units of a plane.
const STRIP: usize = 32;
/// The distance between rows of a plane's part of a strip in shared memory: a column more, which
/// avoids bank conflicts.
const STRIDE: usize = STRIP + 1;
/// Tokens of a product, as rows and as columns.
const ROWS: usize = 16;
const COLUMNS: usize = 8;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    /// Tokens of a block.
    pub(super) block: usize,
    /// Planes of a cube.
    pub(super) planes: usize,
    /// `D`, a multiple of 32.
    pub(super) head_dim: usize,
    pub(super) centred: bool,
    pub(super) valued: bool,
    pub(super) weighted: bool,
    pub(super) seeded: bool,
    pub(super) halves: bool,
}

/// Splits a block by one cube. Keys and values are vectors of eight elements, as 32-bit words.
#[cube(launch_unchecked)]
pub(super) fn tensor_core_kernel<E: Float>(
    pool: &Pool<Vector<u32, Const<4>>, Vector<u32, Const<4>>>,
    lists: &TokenLists,
    centres: &Centres<f32>,
    rules: &WalkRules,
    classes: &mut BlockClasses,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    let block = blueprint.block.comptime();
    let planes = blueprint.planes.comptime();
    let dim = blueprint.head_dim.comptime();
    let units = comptime!(planes * STRIP);
    let longest = lists.longest;
    let blocks = longest.div_ceil(block.runtime());
    let cube = CUBE_POS;
    if cube >= lists.rows * blocks {
        terminate!();
    }
    let (row, index) = (cube / blocks, cube % blocks);
    let first = index * block;
    let token = block_of(lists, rules, row, first, block, blueprint.seeded);
    let tokens = token.tokens;
    let unit = UNIT_POS as usize;
    let (plane, lane) = (unit / STRIP, unit % STRIP);
    let half = tokens.div_ceil(2) as i32;

    // After the block's end, its first token is read again.
    let mut slots = Shared::<[u32]>::new_slice(units);
    let mut factors = Shared::<[f32]>::new_slice(units);
    let mut shifts = Shared::<[f32]>::new_slice(units);
    let mut chosen = Shared::<[i32]>::new_slice(STRIP);
    let mut parts = Shared::<[f32]>::new_slice(comptime!(planes * STRIP * STRIDE));
    let mut slot = token.slot;
    if unit >= tokens && tokens > 0 {
        slot = lists.slots[row * longest + first] as usize;
    }
    slots[unit] = slot as u32;
    let mut weight = 1.0f32;
    if comptime!(blueprint.weighted) && unit < tokens {
        weight = rules.weights[row * longest + first + unit];
    }
    factors[unit] = weight;
    // ⟨k, m⟩ of the unit's key and the mean, and ⟨m, m⟩.
    let mut shift = 0.0f32;
    let mut square = 0.0f32;
    if comptime!(blueprint.centred) {
        let mean = (row * centres.centres + index % centres.centres) * dim;
        for piece in 0..comptime!(dim / 8) {
            let bits = pool.keys[slot * comptime!(dim / 8) + piece];
            #[unroll]
            for word in 0..4usize {
                let pair: Vector<E, Const<2>> = Vector::reinterpret(bits.extract(word));
                let pair: Vector<f32, Const<2>> = Vector::cast_from(pair);
                let at = mean + piece * 8 + word * 2;
                let (left, right) = (centres.means[at], centres.means[at + 1]);
                shift += pair.extract(0usize) * left + pair.extract(1usize) * right;
                square += left * left + right * right;
            }
        }
    }
    shifts[unit] = shift;

    let mut sum = 0.0f32;
    let mut top = f32::new(LOWEST_LOGIT);
    let mut sign = 0i32;
    let mut failing = 0i32;
    let mut before = 0i32;
    let mut positives = 0i32;
    let mut negatives = 0i32;
    let gamma = rules.log_gamma[row];
    let mut start = 0usize;
    while start < tokens {
        // All units have written slots and shifts, and have read the last strip's signs.
        sync_cube();
        let mut terms = Array::<f32>::new(STRIP);
        let mut likeness = Array::<f32>::new(STRIP);
        // The tokens of planes before the strip have their signs already.
        let behind = plane * STRIP >= start && plane * STRIP < tokens;
        if behind {
            strip::<E>(&pool.keys, &slots, &mut parts, &mut terms, start, dim, planes);
            if comptime!(blueprint.valued) {
                strip::<E>(&pool.values, &slots, &mut parts, &mut likeness, start, dim, planes);
            }
        }
        let last = min(unit, tokens);
        let mut highest = top;
        #[unroll]
        for i in 0..STRIP {
            if comptime!(blueprint.centred) {
                terms[i] += square - shift - shifts[min(start + i, units - 1)];
            }
            terms[i] *= rules.scale;
            if behind && start + i < last {
                highest = max(highest, terms[i]);
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
                factor *= weight * factors[min(start + i, units - 1)];
            }
            factor += rules.value_offset;
            let precedes = behind && start + i < last;
            terms[i] = select(precedes, factor * (terms[i] - top).exp(), 0.0f32);
        }
        if plane * STRIP == start {
            let scales = factors_of(top, gamma);
            #[unroll]
            for i in 0..STRIP {
                let found = sign_of(sum, scales.0, scales.1, token.draw);
                let mut own = found.0;
                if comptime!(blueprint.halves) {
                    let taken = select(own > 0, positives, negatives);
                    own = select(taken == half, -own, own);
                }
                if lane == i && unit < tokens {
                    sign = own;
                    failing = found.1;
                    before = select(own > 0, positives, negatives);
                }
                let theirs = plane_shuffle(own, comptime!(i as u32));
                if start + i < tokens {
                    sum += terms[i] * f32::cast_from(theirs);
                    positives += select(theirs > 0, 1i32, 0i32);
                    negatives += select(theirs > 0, 0i32, 1i32);
                }
            }
            chosen[lane] = sign;
        }
        sync_cube();
        if plane * STRIP != start {
            #[unroll]
            for i in 0..STRIP {
                let theirs = chosen[i];
                sum += terms[i] * f32::cast_from(theirs);
                positives += select(theirs > 0, 1i32, 0i32);
                negatives += select(theirs < 0, 1i32, 0i32);
            }
        }
        start += STRIP;
    }
    let outcome = Outcome { sign, before, failing, positives, negatives };
    finish(classes, token, outcome, cube, longest, block, units);
}

/// The products of a unit's row with the rows of a strip.
///
/// In a plane, lane `4 r + j` holds rows `r` and `r + 8` of a product and columns `2 j`, `2 j + 1`.
/// The order of the summed dimension is free, so both factors are read in pieces of 16 bytes.
#[cube]
fn strip<E: Float>(
    pool: &[Vector<u32, Const<4>>],
    slots: &Shared<[u32]>,
    parts: &mut Shared<[f32]>,
    dots: &mut Array<f32>,
    start: usize,
    #[comptime] dim: usize,
    #[comptime] planes: usize,
) {
    let def = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let tall = comptime!(STRIP / ROWS);
    let wide = comptime!(STRIP / COLUMNS);
    let unit = UNIT_POS as usize;
    let (plane, lane) = (unit / STRIP, unit % STRIP);
    let (r, j) = (lane / 4, lane % 4);
    let pieces = comptime!(dim / 32);
    let none = Vector::<f32, Const<2>>::new(0.0f32);
    let mut sums = Array::<Vector<f32, Const<2>>>::new(comptime!(tall * wide * 2));
    #[unroll]
    for i in 0..comptime!(tall * wide * 2) {
        sums[i] = none;
    }
    let mut own = Array::<usize>::new(wide);
    #[unroll]
    for n in 0..wide {
        own[n] = slots[plane * STRIP + n * COLUMNS + r] as usize * comptime!(dim / 8) + j;
    }
    let mut theirs = Array::<usize>::new(comptime!(tall * 2));
    #[unroll]
    for m in 0..comptime!(tall * 2) {
        let at = min(start + m * 8 + r, comptime!(planes * STRIP - 1).runtime());
        theirs[m] = slots[at] as usize * comptime!(dim / 8) + j;
    }
    for piece in 0..pieces {
        let mut a = Array::<Vector<u32, Const<4>>>::new(comptime!(tall * 2));
        #[unroll]
        for m in 0..comptime!(tall * 2) {
            a[m] = pool[theirs[m] + 4 * piece];
        }
        let mut b = Array::<Vector<u32, Const<4>>>::new(wide);
        #[unroll]
        for n in 0..wide {
            b[n] = pool[own[n] + 4 * piece];
        }
        #[unroll]
        for side in 0..2usize {
            #[unroll]
            for m in 0..tall {
                let mut left = Array::<Vector<E, Const<2>>>::new(4usize);
                left[0] = Vector::reinterpret(a[2 * m].extract(comptime!(2 * side)));
                left[1] = Vector::reinterpret(a[2 * m + 1].extract(comptime!(2 * side)));
                left[2] = Vector::reinterpret(a[2 * m].extract(comptime!(2 * side + 1)));
                left[3] = Vector::reinterpret(a[2 * m + 1].extract(comptime!(2 * side + 1)));
                #[unroll]
                for n in 0..wide {
                    let mut right = Array::<Vector<E, Const<2>>>::new(2usize);
                    right[0] = Vector::reinterpret(b[n].extract(comptime!(2 * side)));
                    right[1] = Vector::reinterpret(b[n].extract(comptime!(2 * side + 1)));
                    let at = comptime!((m * wide + n) * 2);
                    let mut acc = Array::<Vector<f32, Const<2>>>::new(2usize);
                    acc[0] = sums[at];
                    acc[1] = sums[at + 1];
                    acc = def.execute(&left, &right, &acc);
                    sums[at] = acc[0];
                    sums[at + 1] = acc[1];
                }
            }
        }
    }
    // Products move from the lanes that hold them to the lanes of their tokens.
    let room = plane * comptime!(STRIP * STRIDE);
    #[unroll]
    for m in 0..tall {
        #[unroll]
        for n in 0..wide {
            #[unroll]
            for e in 0..2usize {
                let column = comptime!(n * COLUMNS + e) + 2 * j;
                let at = comptime!((m * wide + n) * 2);
                let upper = (comptime!(m * ROWS) + r) * STRIDE + column;
                parts[room + upper] = sums[at].extract(e);
                parts[room + upper + comptime!(8 * STRIDE)] = sums[at + 1].extract(e);
            }
        }
    }
    sync_plane();
    #[unroll]
    for i in 0..STRIP {
        dots[i] = parts[room + comptime!(i * STRIDE) + lane];
    }
    sync_plane();
}
