//! Adding a step's probabilities to all scores: by a kernel of its own where there are many tokens, else
//! as the beginning of the one that moves them.

use cubecl::prelude::*;

use crate::count_sketch::HEAD_FIELDS;
use crate::decode_attention::shared::weight_of;
use crate::evicting_attention::weigh::{NOWHERE, weakest_of};

/// Rows that a unit reads before it waits for the first.
pub(crate) const AHEAD: usize = 4;
/// Units of a cube of the kernel alone.
pub(crate) const UNITS: usize = 128;

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Query heads of a range.
    pub(crate) group: usize,
    /// Whether logits of slots stand among those of tokens.
    pub(crate) by_token: bool,
    /// Units of a cube, and its planes, at most.
    pub(crate) units: usize,
    pub(crate) planes: usize,
}

/// Cubes share a range: each takes a part of its tokens, and every so many of its slots.
///
/// # Shapes
/// `slot_scores` `[S]`, `token_scores` `[T]`, `slot_logits` `[S, group]` (`[T, group]` where they stand
/// among the tokens'), `token_logits` `[T, group]`, `log_sum_exp` `[pairs, group]`; `tops` and `tops_at`
/// `[pairs, parts]`: the highest score of each `part` of tokens, negated, and its token.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn accumulate_kernel(
    slot_scores: &mut [f32],
    token_scores: &mut [f32],
    slot_logits: &[f32],
    token_logits: &[f32],
    log_sum_exp: &[f32],
    positions: &[i32],
    offsets: &[i32],
    lengths: &[i32],
    heads: &[i32],
    newest: &[i32],
    tops: &mut [f32],
    tops_at: &mut [i32],
    pairs: usize,
    kv_heads: usize,
    parts: usize,
    part: usize,
    #[comptime] blueprint: Blueprint,
) {
    let cube = CUBE_POS;
    if cube >= pairs * parts {
        terminate!();
    }
    let (top, top_at) = accumulate_part(
        slot_scores,
        token_scores,
        slot_logits,
        token_logits,
        log_sum_exp,
        positions,
        offsets,
        lengths,
        heads,
        newest,
        cube / parts,
        kv_heads,
        cube % parts,
        parts,
        part,
        blueprint,
    );
    if UNIT_POS == 0 {
        tops[cube] = top;
        tops_at[cube] = top_at;
    }
}

/// A cube's share: the `of`-th part of the tokens, and every `parts`-th turn of slots. Returns the highest
/// score of the part, negated, and its token.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn accumulate_part(
    slot_scores: &mut [f32],
    token_scores: &mut [f32],
    slot_logits: &[f32],
    token_logits: &[f32],
    log_sum_exp: &[f32],
    positions: &[i32],
    offsets: &[i32],
    lengths: &[i32],
    heads: &[i32],
    newest: &[i32],
    pair: usize,
    kv_heads: usize,
    of: usize,
    parts: usize,
    part: usize,
    #[comptime] blueprint: Blueprint,
) -> (f32, i32) {
    let group = blueprint.group.comptime();
    let units = blueprint.units.comptime();
    let unit = UNIT_POS as usize;
    let head = pair * HEAD_FIELDS;
    let first_token = heads[head + 2] as usize;
    let last = newest[pair / kv_heads];
    let seen = max(min(last + 1i32, heads[head + 3]), 0i32) as usize;

    let mut totals = Array::<f32>::new(group);
    #[unroll]
    for g in 0..group {
        totals[g] = log_sum_exp[pair * group + g];
    }

    let start = offsets[pair] as usize;
    let length = lengths[pair] as usize;
    let mut first = of * comptime!(AHEAD * units) + unit;
    while first < length {
        let mut places = Array::<i32>::new(AHEAD);
        let mut before = Array::<f32>::new(AHEAD);
        let mut own = Array::<f32>::new(AHEAD);
        #[unroll]
        for a in 0..AHEAD {
            let slot = start + min(first + a * units, length - 1);
            places[a] = positions[slot];
            before[a] = slot_scores[slot];
        }
        #[unroll]
        for a in 0..AHEAD {
            let mut row = start + min(first + a * units, length - 1);
            if comptime!(blueprint.by_token) {
                row = first_token + places[a] as usize;
            }
            own[a] = mass(slot_logits, &totals, row, group);
        }
        #[unroll]
        for a in 0..AHEAD {
            let i = first + a * units;
            if i < length {
                // A new token begins with what this step gives it.
                slot_scores[start + i] = select(places[a] == last, own[a], before[a] + own[a]);
            }
        }
        first += comptime!(AHEAD * units) * parts;
    }

    // Negated, so that the least is found.
    let mut best = 1.0f32;
    let mut best_at = i32::new(NOWHERE as i64);
    let end = min((of + 1) * part, seen);
    let mut first = of * part + unit;
    while first < end {
        let mut scores = Array::<f32>::new(AHEAD);
        let mut own = Array::<f32>::new(AHEAD);
        #[unroll]
        for a in 0..AHEAD {
            scores[a] = token_scores[first_token + min(first + a * units, end - 1)];
        }
        #[unroll]
        for a in 0..AHEAD {
            let row = first_token + min(first + a * units, end - 1);
            own[a] = mass(token_logits, &totals, row, group);
        }
        #[unroll]
        for a in 0..AHEAD {
            let token = first + a * units;
            if token < end && scores[a] >= 0.0f32 {
                let score = scores[a] + own[a];
                token_scores[first_token + token] = score;
                if -score < best {
                    best = -score;
                    best_at = i32::cast_from(token);
                }
            }
        }
        first += comptime!(AHEAD * units);
    }
    weakest_of(best, best_at, blueprint.planes)
}

/// A row's probabilities, summed over the group.
#[cube]
fn mass(logits: &[f32], totals: &Array<f32>, row: usize, #[comptime] group: usize) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for g in 0..group {
        sum += weight_of(logits[row * group + g], totals[g]);
    }
    // NaN counts for nothing: a token without a score would be in no part.
    select(sum >= 0.0f32, sum, 0.0f32)
}
