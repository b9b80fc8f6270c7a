//! The walk that both kernels of `balance` share: a token's place in its list, its sign, and the
//! output.

use cubecl::prelude::*;

use crate::components::sentinels::NO_SLOT;
use crate::layers::random::kernel::uniform;

/// Lists of tokens, which are walked in blocks.
#[derive(CubeType, CubeLaunch)]
pub(super) struct TokenLists {
    /// Slots, `[P, longest]`.
    pub(super) slots: Box<[i32]>,
    /// Tokens of each list, `[P]`.
    pub(super) counts: Box<[i32]>,
    /// `P`
    pub(super) rows: usize,
    pub(super) longest: usize,
}

/// The means by which keys are centred.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Centres<M: CubePrimitive> {
    /// `[P, centres, D]`, in the kernel's vectors.
    pub(super) means: Box<[M]>,
    /// Means of a list: 1, or one for each block.
    pub(super) centres: usize,
}

/// The rules by which a token's sign is decided.
#[derive(CubeType, CubeLaunch)]
pub(super) struct WalkRules {
    /// `ln γ` of each list, `[P]`.
    pub(super) log_gamma: Box<[f32]>,
    /// Factors of the tokens' values, `[P, longest]`, where they are weighted.
    pub(super) weights: Box<[f32]>,
    /// Seeds of each list's random numbers, `[P, 2]`, where they are seeded.
    pub(super) seeds: Box<[i32]>,
    /// Random numbers, `[P, longest]`, where they are given.
    pub(super) numbers: Box<[f32]>,
    /// The factor of `⟨k_i, k_j⟩`.
    pub(super) scale: f32,
    /// The offset that is added to `⟨v_i, v_j⟩`.
    pub(super) value_offset: f32,
}

/// The classes of tokens.
#[derive(CubeType, CubeLaunch)]
pub(super) struct BlockClasses {
    /// Signs, `[P, longest]`; 0 after a list's end.
    pub(super) signs: Box<[i32]>,
    /// Slots of each block's smaller class, `[P, longest / 2]`, with [`NO_SLOT`] after them.
    pub(super) kept: Box<[i32]>,
    /// Whether a probability was outside `[0, 1]`, `[P, blocks]`.
    pub(super) failed: Box<[i32]>,
}

/// The block of a cube, and the token of a unit.
#[derive(CubeType, Clone, Copy)]
pub(super) struct BlockToken {
    /// The list.
    pub(super) row: usize,
    /// The block's first place in the list.
    pub(super) first: usize,
    /// Tokens of the block. Units from this number on have none.
    pub(super) tokens: usize,
    /// The slot of the unit's token.
    pub(super) slot: usize,
    /// The token's random number.
    pub(super) draw: f32,
}

#[cube]
pub(super) fn block_of(
    lists: &TokenLists,
    rules: &WalkRules,
    row: usize,
    first: usize,
    #[comptime] block: usize,
    #[comptime] seeded: bool,
) -> BlockToken {
    let unit = UNIT_POS as usize;
    let longest = lists.longest;
    let count = min(lists.counts[row] as usize, longest);
    let tokens = min(max(count, first) - first, block.runtime());
    let index_in_list = first + unit;
    let mut slot = 0usize;
    let mut draw = 0.0f32;
    if unit < tokens {
        slot = lists.slots[row * longest + index_in_list] as usize;
        if seeded {
            let (low, high) = (rules.seeds[row * 2], rules.seeds[row * 2 + 1]);
            draw = uniform(u32::cast_from(low), u32::cast_from(high), index_in_list as u32);
        } else {
            draw = rules.numbers[row * longest + index_in_list];
        }
    }
    BlockToken { row, first, tokens, slot, draw }
}

/// The span of a place in a block of `tokens`: its first place and the place behind its last one.
#[cube]
pub(super) fn span_of(place: usize, tokens: usize, #[comptime] span: usize) -> (usize, usize) {
    if comptime!(span == 1) {
        (place, place + 1)
    } else {
        let pair = comptime!(2 * span).runtime();
        let whole = tokens / pair * pair;
        let first = place / span.runtime() * span.runtime();
        // The tokens behind the last pair of spans are two shorter ones.
        let second = whole + (tokens - whole).div_ceil(2);
        let short = select(place < second, whole, second);
        let end = select(place < second, second, tokens);
        (select(place < whole, first, short), select(place < whole, first + span.runtime(), end))
    }
}

/// The sum of several sums, each with an exponent of its own.
#[cube]
pub(super) fn joined(sums: &Shared<[f32]>, tops: &Shared<[f32]>, count: usize) -> (f32, f32) {
    let mut top = tops[0];
    for at in 1..count {
        top = max(top, tops[at]);
    }
    let mut sum = 0.0f32;
    for at in 0..count {
        sum += sums[at] * (tops[at] - top).exp();
    }
    (sum, top)
}

/// The factors of a sum with the exponent `top`, and of the number that it is compared with. They
/// keep both finite.
#[cube]
pub(super) fn factors_of(top: f32, log_gamma: f32) -> (f32, f32) {
    let exponent = top + log_gamma;
    (min(exponent, 0.0f32).exp(), (-max(exponent, 0.0f32)).exp())
}

/// A token's sign, and whether its probability was outside `[0, 1]`.
#[cube]
pub(super) fn sign_of(sum: f32, own: f32, one: f32, draw: f32) -> (i32, i32) {
    let one = select(sum == 0.0f32, 1.0f32, one);
    let own = select(sum == 0.0f32, 0.0f32, sum * own);
    let sign = select(own < (0.5f32 - draw) * one, 1i32, -1i32);
    (sign, select(own.abs() > 0.5f32 * one, 1i32, 0i32))
}

/// The result of a unit's token, and the class counts of its block.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Outcome {
    pub(super) sign: i32,
    /// Tokens of the same sign before the unit's token.
    pub(super) before: i32,
    /// Whether the token's probability was outside `[0, 1]`.
    pub(super) failing: i32,
    pub(super) positives: i32,
    pub(super) negatives: i32,
}

/// Writes a block's signs, the slots of its smaller class, and whether a token failed.
#[cube]
pub(super) fn finish(
    classes: &mut BlockClasses,
    token: BlockToken,
    outcome: Outcome,
    cube: usize,
    longest: usize,
    #[comptime] block: usize,
    #[comptime] units: usize,
) {
    let unit = UNIT_POS as usize;
    let (row, first, tokens) = (token.row, token.first, token.tokens);
    if unit < block && first + unit < longest {
        classes.signs[row * longest + first + unit] = outcome.sign;
    }
    let class = select(outcome.positives <= outcome.negatives, 1i32, -1i32);
    let members = min(outcome.positives, outcome.negatives);
    let halves = max(longest / 2, 1usize);
    let room = row * halves + first / 2;
    if unit < tokens && outcome.sign == class {
        classes.kept[room + outcome.before as usize] = token.slot as i32;
    }
    // The places of the block's half that the class leaves free.
    let end = min(first / 2 + comptime!(block / 2), halves) - min(first / 2, halves);
    if unit >= members as usize && unit < end {
        classes.kept[room + unit] = i32::new(NO_SLOT as i64);
    }
    let mut flags = Shared::<[i32]>::new_slice(units);
    flags[unit] = outcome.failing;
    sync_cube();
    if unit == 0 {
        let mut any = 0i32;
        for other in 0..units {
            any |= flags[other];
        }
        classes.failed[cube] = any;
    }
}
