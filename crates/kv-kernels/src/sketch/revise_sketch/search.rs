//! Looking for what is to move: the slot of the lowest score, the token of the highest.

use cubecl::prelude::*;

use super::accumulate::{Blueprint, SLOTS_AHEAD};
use crate::components::argmin::block_argmin;
use crate::components::barrier::sync_memory;
use crate::components::sentinels::{NO_INDEX, NO_MINIMUM};

/// A score, and where it was found.
#[derive(CubeType)]
pub(super) struct Weakest {
    pub(super) value: f32,
    /// [`NO_INDEX`] if there is none.
    pub(super) at: i32,
}

#[cube]
impl Weakest {
    pub(super) fn set(&mut self, other: Weakest) {
        self.value = other.value;
        self.at = other.at;
    }
}

/// The least of what the cube's units have found, the first among equals.
#[cube]
pub(super) fn weakest(value: f32, at: i32, #[comptime] planes: usize) -> Weakest {
    let (value, at) = block_argmin(value, at, planes);
    Weakest { value, at }
}

/// The lowest score among slots of tokens before `bound`.
#[cube]
pub(super) fn lowest(
    slot_scores: &[f32],
    positions: &[i32],
    start: usize,
    length: usize,
    bound: i32,
    #[comptime] blueprint: Blueprint,
) -> Weakest {
    let (unit, units) = (UNIT_POS as usize, comptime!(blueprint.units).runtime());
    let own = lowest_of(slot_scores, positions, start, length, bound, unit, units, SLOTS_AHEAD);
    weakest(own.value, own.at, blueprint.planes)
}

/// What a unit finds that has every `stride`-th slot from `first` on, and reads so many `ahead`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn lowest_of(
    slot_scores: &[f32],
    positions: &[i32],
    start: usize,
    length: usize,
    bound: i32,
    first: usize,
    stride: usize,
    #[comptime] ahead: usize,
) -> Weakest {
    let mut best = f32::new(NO_MINIMUM);
    let mut best_at = i32::new(NO_INDEX as i64);
    for round in 0..length.div_ceil(ahead * stride) {
        let first = first + round * ahead * stride;
        let mut places = Array::<i32>::new(ahead);
        let mut scores = Array::<f32>::new(ahead);
        #[unroll]
        for a in 0..ahead {
            let slot = start + min(first + a * stride, length - 1);
            places[a] = positions[slot];
            scores[a] = slot_scores[slot];
        }
        #[unroll]
        for a in 0..ahead {
            let i = first + a * stride;
            if i < length && places[a] < bound && scores[a] < best {
                best = scores[a];
                best_at = i32::cast_from(i);
            }
        }
    }
    Weakest { value: best, at: best_at }
}

/// The highest score of all parts' tokens, negated.
#[cube]
pub(super) fn highest(
    tops: &[f32],
    tops_at: &[i32],
    first_part: usize,
    parts: usize,
    #[comptime] blueprint: Blueprint,
) -> Weakest {
    let mut best = f32::new(NO_MINIMUM);
    let mut best_at = i32::new(NO_INDEX as i64);
    let mut of = UNIT_POS as usize;
    while of < parts {
        let (top, top_at) = (tops[first_part + of], tops_at[first_part + of]);
        if top_at != NO_INDEX && (best_at == NO_INDEX || top < best) {
            best = top;
            best_at = top_at;
        }
        of += comptime!(blueprint.units);
    }
    weakest(best, best_at, blueprint.planes)
}

/// Finds a part's highest score anew.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn top_of(
    token_scores: &[f32],
    tops: &mut [f32],
    tops_at: &mut [i32],
    first_part: usize,
    first_token: usize,
    of: usize,
    part: usize,
    seen: usize,
    #[comptime] fenced: bool,
    #[comptime] blueprint: Blueprint,
) {
    let mut best = 1.0f32;
    let mut best_at = i32::new(NO_INDEX as i64);
    let end = min((of + 1) * part, seen);
    let mut token = of * part + UNIT_POS as usize;
    while token < end {
        let score = token_scores[first_token + token];
        if score >= 0.0f32 && (best_at == NO_INDEX || -score < best) {
            best = -score;
            best_at = i32::cast_from(token);
        }
        token += comptime!(blueprint.units);
    }
    let (top, top_at) = block_argmin(best, best_at, blueprint.planes);
    if UNIT_POS == 0 {
        tops[first_part + of] = top;
        tops_at[first_part + of] = top_at;
    }
    sync_memory(fenced);
}

/// Takes tokens that are new to a sketch into the highest scores, negated, of their parts.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn raise_tops(
    tops: &mut [f32],
    tops_at: &mut [i32],
    tokens: &Shared<[i32]>,
    scores: &Shared<[f32]>,
    count: usize,
    first_part: usize,
    parts: usize,
    part: usize,
    #[comptime] blueprint: Blueprint,
) {
    let mut of = UNIT_POS as usize;
    while of < parts {
        let mut top = tops[first_part + of];
        let mut top_at = tops_at[first_part + of];
        for victim in 0..count {
            let token = tokens[victim];
            let score = -scores[victim];
            if token as usize / part == of
                && (top_at == NO_INDEX || score < top || (score == top && token < top_at))
            {
                top = score;
                top_at = token;
            }
        }
        tops[first_part + of] = top;
        tops_at[first_part + of] = top_at;
        of += comptime!(blueprint.units);
    }
}
