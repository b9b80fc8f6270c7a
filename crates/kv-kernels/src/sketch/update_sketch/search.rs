//! Searches for the slot of the lowest score and the token of the highest score.

use cubecl::prelude::*;

use super::accumulate::{Blueprint, SLOTS_AHEAD};
use super::kernel_args::{ScoredSlots, TokenScores};
use super::victims::Victims;
use crate::components::argmin::block_argmin;
use crate::components::barrier::sync_memory;
use crate::components::sentinels::{NO_INDEX, NO_MINIMUM};

/// The lowest number of a search, and its place.
#[derive(CubeType)]
pub(super) struct Weakest {
    pub(super) value: f32,
    /// The place; [`NO_INDEX`] if there is none.
    pub(super) at: i32,
}

#[cube]
impl Weakest {
    pub(super) fn set(&mut self, other: Weakest) {
        self.value = other.value;
        self.at = other.at;
    }
}

/// The least number of the cube's units, at the first place among equals.
#[cube]
pub(super) fn weakest(value: f32, at: i32, #[comptime] planes: usize) -> Weakest {
    let (value, at) = block_argmin(value, at, planes);
    Weakest { value, at }
}

/// The slots of a range that are searched for the lowest score.
#[derive(CubeType, Clone, Copy)]
pub(super) struct SearchedSlots {
    /// The range's first slot.
    pub(super) start: usize,
    /// Slots to search.
    pub(super) length: usize,
    /// Slots whose tokens are at this position or later are left out.
    pub(super) bound: i32,
}

/// The lowest score of the searched slots.
#[cube]
pub(super) fn lowest(
    slots: &ScoredSlots,
    among: &SearchedSlots,
    #[comptime] blueprint: Blueprint,
) -> Weakest {
    let (unit, units) = (UNIT_POS as usize, comptime!(blueprint.units).runtime());
    let own = lowest_of(slots, among, unit, units, SLOTS_AHEAD);
    weakest(own.value, own.at, blueprint.planes)
}

/// The lowest score among every `stride`-th slot from `first` on, for one unit, which reads `ahead`
/// slots at once.
#[cube]
pub(super) fn lowest_of(
    slots: &ScoredSlots,
    among: &SearchedSlots,
    first: usize,
    stride: usize,
    #[comptime] ahead: usize,
) -> Weakest {
    let mut best = f32::new(NO_MINIMUM);
    let mut best_at = i32::new(NO_INDEX as i64);
    let (start, length) = (among.start, among.length);
    for round in 0..length.div_ceil(ahead * stride) {
        let first = first + round * ahead * stride;
        let mut places = Array::<i32>::new(ahead);
        let mut scores = Array::<f32>::new(ahead);
        #[unroll]
        for a in 0..ahead {
            let slot = start + min(first + a * stride, length - 1);
            places[a] = slots.positions[slot];
            scores[a] = slots.scores[slot];
        }
        #[unroll]
        for a in 0..ahead {
            let i = first + a * stride;
            if i < length && places[a] < among.bound && scores[a] < best {
                best = scores[a];
                best_at = i32::cast_from(i);
            }
        }
    }
    Weakest { value: best, at: best_at }
}

/// The highest score of a range's tokens, negated, from the parts' highest scores.
#[cube]
pub(super) fn highest(
    tokens: &TokenScores,
    kv_head: usize,
    #[comptime] blueprint: Blueprint,
) -> Weakest {
    let mut best = f32::new(NO_MINIMUM);
    let mut best_at = i32::new(NO_INDEX as i64);
    let (parts, first_part) = (tokens.parts, kv_head * tokens.parts);
    let mut of = UNIT_POS as usize;
    while of < parts {
        let (top, top_at) = (tokens.tops[first_part + of], tokens.tops_at[first_part + of]);
        if top_at != NO_INDEX && (best_at == NO_INDEX || top < best) {
            best = top;
            best_at = top_at;
        }
        of += comptime!(blueprint.units);
    }
    weakest(best, best_at, blueprint.planes)
}

/// The tokens of a range.
#[derive(CubeType, Clone, Copy)]
pub(super) struct RangeTokens {
    pub(super) kv_head: usize,
    /// The range's first token, counted over all ranges.
    pub(super) first_token: usize,
    /// Tokens of the range so far.
    pub(super) seen: usize,
}

/// Searches part number `of` of a range's tokens for its highest score.
#[cube]
pub(super) fn top_of(
    tokens: &mut TokenScores,
    range: &RangeTokens,
    of: usize,
    #[comptime] fenced: bool,
    #[comptime] blueprint: Blueprint,
) {
    let mut best = 1.0f32;
    let mut best_at = i32::new(NO_INDEX as i64);
    let part = tokens.part;
    let end = min((of + 1) * part, range.seen);
    let mut token = of * part + UNIT_POS as usize;
    while token < end {
        let score = tokens.scores[range.first_token + token];
        if score >= 0.0f32 && (best_at == NO_INDEX || -score < best) {
            best = -score;
            best_at = i32::cast_from(token);
        }
        token += comptime!(blueprint.units);
    }
    let (top, top_at) = block_argmin(best, best_at, blueprint.planes);
    if UNIT_POS == 0 {
        let at = range.kv_head * tokens.parts + of;
        tokens.tops[at] = top;
        tokens.tops_at[at] = top_at;
    }
    sync_memory(fenced);
}

/// Updates the parts' highest scores with `count` tokens that are new in the sketch. Scores are
/// negated.
#[cube]
pub(super) fn raise_tops(
    tokens: &mut TokenScores,
    victims: &Victims,
    count: usize,
    kv_head: usize,
    #[comptime] blueprint: Blueprint,
) {
    let (parts, part, first_part) = (tokens.parts, tokens.part, kv_head * tokens.parts);
    let mut of = UNIT_POS as usize;
    while of < parts {
        let mut top = tokens.tops[first_part + of];
        let mut top_at = tokens.tops_at[first_part + of];
        for victim in 0..count {
            let token = victims.tokens[victim];
            let score = -victims.scores[victim];
            if token as usize / part == of
                && (top_at == NO_INDEX || score < top || (score == top && token < top_at))
            {
                top = score;
                top_at = token;
            }
        }
        tokens.tops[first_part + of] = top;
        tokens.tops_at[first_part + of] = top_at;
        of += comptime!(blueprint.units);
    }
}
