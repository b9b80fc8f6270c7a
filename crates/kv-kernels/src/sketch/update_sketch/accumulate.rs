//! Adds a step's attention probabilities to all scores. Where a range has many tokens, a kernel of
//! its own does it, with several cubes a range; elsewhere the kernel that moves tokens begins with
//! it.

use cubecl::prelude::*;

use super::kernel_args::{ScoredSlots, StepLogits, TokenScores};
use crate::components::argmin::block_argmin;
use crate::components::sentinels::{NO_INDEX, NO_MINIMUM};
use crate::components::softmax::weight_of;
use crate::sketch::count_sketch::HEAD_FIELDS;

/// Slots that a unit reads before it waits for the first: in most cubes, all slots of the unit.
pub(crate) const SLOTS_AHEAD: usize = 2;
/// Units of a cube of the separate kernel.
pub(crate) const UNITS: usize = 128;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Query heads of a range.
    pub(crate) group: usize,
    /// Whether the logits of slots lie among the tokens' logits.
    pub(crate) by_token: bool,
    /// Tokens that a unit reads before it waits for the first.
    pub(crate) ahead: usize,
    /// Units of a cube; and its planes, at most.
    pub(crate) units: usize,
    pub(crate) planes: usize,
}

/// Adds probabilities, with `tokens.parts` cubes a range. Each cube takes a part of the tokens, and
/// every `parts`-th turn of slots. `heads` are the sketch's.
#[cube(launch_unchecked)]
pub(crate) fn accumulate_kernel(
    slots: &mut ScoredSlots,
    tokens: &mut TokenScores,
    step: &StepLogits,
    heads: &[i32],
    #[comptime] blueprint: Blueprint,
) {
    let cube = CUBE_POS;
    let parts = tokens.parts;
    if cube >= step.total_kv_heads * parts {
        terminate!();
    }
    let share = Share { kv_head: cube / parts, of: cube % parts, parts };
    let found = accumulate_part(slots, tokens, step, heads, &share, blueprint);
    let (top, top_at) = block_argmin(found.top, found.top_at, blueprint.planes);
    if UNIT_POS == 0 {
        tokens.tops[cube] = top;
        tokens.tops_at[cube] = top_at;
    }
}

/// The extreme scores that a unit finds while it adds.
#[derive(CubeType)]
pub(crate) struct Found {
    /// The highest score of the part's tokens, negated, and its token.
    pub(crate) top: f32,
    pub(crate) top_at: i32,
    /// The lowest score of a slot whose token is not recent, and its place in the range.
    pub(crate) low: f32,
    pub(crate) low_at: i32,
}

/// The part of a range that a cube takes: part number `of` of the tokens, and every `parts`-th turn
/// of slots.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Share {
    pub(crate) kv_head: usize,
    pub(crate) of: usize,
    pub(crate) parts: usize,
}

/// Adds probabilities to the scores of a cube's part.
#[cube]
pub(crate) fn accumulate_part(
    slots: &mut ScoredSlots,
    tokens: &mut TokenScores,
    step: &StepLogits,
    heads: &[i32],
    share: &Share,
    #[comptime] blueprint: Blueprint,
) -> Found {
    let group = blueprint.group.comptime();
    let units = blueprint.units.comptime();
    let slots_turn = comptime!(SLOTS_AHEAD * units);
    let ahead = blueprint.ahead.comptime();
    let tokens_turn = comptime!(ahead * units);
    let unit = UNIT_POS as usize;
    let (kv_head, of, parts) = (share.kv_head, share.of, share.parts);
    let part = tokens.part;
    let head = kv_head * HEAD_FIELDS;
    let first_token = heads[head + 2] as usize;
    let last = step.newest[kv_head / step.kv_heads];
    let seen = max(min(last + 1i32, heads[head + 3]), 0i32) as usize;

    let mut totals = Array::<f32>::new(group);
    #[unroll]
    for g in 0..group {
        totals[g] = step.log_sum_exp[kv_head * group + g];
    }

    let start = slots.offsets[kv_head] as usize;
    let length = slots.lengths[kv_head] as usize;
    let bound = first_recent(slots.lengths[kv_head], heads[head + 4], heads[head + 5], last + 1i32);
    let end = min((of + 1) * part, seen);
    let mut found = Found {
        top: 1.0f32,
        top_at: i32::new(NO_INDEX as i64),
        low: f32::new(NO_MINIMUM),
        low_at: i32::new(NO_INDEX as i64),
    };
    let mut slot = of * slots_turn + unit;
    let mut token = of * part + unit;
    while slot < length || token < end {
        // All reads of a turn, of slots and of tokens, are issued before the first is waited for.
        let mut places = Array::<i32>::new(SLOTS_AHEAD);
        let mut before = Array::<f32>::new(SLOTS_AHEAD);
        let mut scores = Array::<f32>::new(ahead);
        let mut given = Array::<f32>::new(ahead);
        if slot < length {
            #[unroll]
            for a in 0..SLOTS_AHEAD {
                let at = start + min(slot + a * units, length - 1);
                places[a] = slots.positions[at];
                before[a] = slots.scores[at];
            }
        }
        if token < end {
            #[unroll]
            for a in 0..ahead {
                let row = first_token + min(token + a * units, end - 1);
                scores[a] = tokens.scores[row];
                given[a] = mass(&step.tokens, &totals, row, group);
            }
        }
        if slot < length {
            let mut own = Array::<f32>::new(SLOTS_AHEAD);
            #[unroll]
            for a in 0..SLOTS_AHEAD {
                let mut row = start + min(slot + a * units, length - 1);
                if comptime!(blueprint.by_token) {
                    row = first_token + places[a] as usize;
                }
                own[a] = mass(&step.slots, &totals, row, group);
            }
            #[unroll]
            for a in 0..SLOTS_AHEAD {
                let i = slot + a * units;
                if i < length {
                    // A new token's score begins with this step.
                    let score = select(places[a] == last, own[a], before[a] + own[a]);
                    slots.scores[start + i] = score;
                    if places[a] < bound && score < found.low {
                        found.low = score;
                        found.low_at = i32::cast_from(i);
                    }
                }
            }
        }
        #[unroll]
        for a in 0..ahead {
            let at = token + a * units;
            if at < end && scores[a] >= 0.0f32 {
                let score = scores[a] + given[a];
                tokens.scores[first_token + at] = score;
                // Negated, since a minimum is searched for.
                if -score < found.top {
                    found.top = -score;
                    found.top_at = i32::cast_from(at);
                }
            }
        }
        slot += slots_turn * parts;
        token += tokens_turn;
    }
    found
}

/// The position of the first recent token, for exchanges between slots and sketch, in a range of
/// `length` slots: the slots that it holds beyond its candidates are recent. `behind` is the
/// position after the newest token.
#[cube]
pub(crate) fn first_recent(length: i32, limit: i32, recents: i32, behind: i32) -> i32 {
    behind - max(length - (limit - recents), 0i32)
}

/// A row's probabilities, summed over the group's query heads.
#[cube]
fn mass(logits: &[f32], totals: &Array<f32>, row: usize, #[comptime] group: usize) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for g in 0..group {
        sum += weight_of(logits[row * group + g], totals[g]);
    }
    // NaN counts as 0: a token with a NaN score would be found in no part.
    select(sum >= 0.0f32, sum, 0.0f32)
}
