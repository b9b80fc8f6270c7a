//! The kernel that adds a step's probabilities to all scores.

use cubecl::prelude::*;

use crate::count_sketch::HEAD_FIELDS;
use crate::decode_attention::shared::weight_of;
use crate::evicting_attention::weigh::{NOWHERE, weakest_of};

/// Units of a cube.
pub(crate) const UNITS: usize = 128;
/// Tokens of a part.
pub(crate) const PART: usize = 512;

/// Cubes share a range: each takes a part of its tokens, and every so many of its slots.
///
/// # Shapes
/// `slot_scores` `[S]`, `token_scores` `[T]`, `slot_logits` `[S, group]` (`[T, group]` where `by_token`),
/// `token_logits` `[T, group]`, `log_sum_exp` `[pairs, group]`; `tops` and `tops_at` `[pairs, parts]`:
/// each part's highest score, negated, and its token.
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
    #[comptime] group: usize,
    #[comptime] by_token: bool,
    #[comptime] planes: usize,
) {
    let cube = CUBE_POS;
    if cube >= pairs * parts {
        terminate!();
    }
    let (pair, part) = (cube / parts, cube % parts);
    let unit = UNIT_POS as usize;
    let head = pair * HEAD_FIELDS;
    let first_token = heads[head + 2] as usize;
    let seen = min(newest[pair / kv_heads] + 1i32, heads[head + 3]) as usize;

    let start = offsets[pair] as usize;
    let length = lengths[pair] as usize;
    let mut i = part * UNITS + unit;
    while i < length {
        let slot = start + i;
        let mut row = slot;
        if by_token {
            row = first_token + positions[slot] as usize;
        }
        slot_scores[slot] += mass(slot_logits, log_sum_exp, row, pair, group);
        i += parts * UNITS;
    }

    // Negated, so that the least is found.
    let mut best = 0.0f32;
    let mut best_at = i32::new(NOWHERE as i64);
    let end = min((part + 1) * PART, seen);
    let mut token = part * PART + unit;
    while token < end {
        let at = first_token + token;
        let mut score = token_scores[at];
        if score >= 0.0f32 {
            score += mass(token_logits, log_sum_exp, at, pair, group);
            token_scores[at] = score;
            if best_at == NOWHERE || -score < best {
                best = -score;
                best_at = i32::cast_from(token);
            }
        }
        token += UNITS;
    }
    let (top, top_at) = weakest_of(select(best_at == NOWHERE, 1.0f32, best), best_at, planes);
    if unit == 0 {
        tops[cube] = top;
        tops_at[cube] = top_at;
    }
}

/// A row's probabilities, summed over the group.
#[cube]
fn mass(
    logits: &[f32],
    log_sum_exp: &[f32],
    row: usize,
    pair: usize,
    #[comptime] group: usize,
) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for g in 0..group {
        sum += weight_of(logits[row * group + g], log_sum_exp[pair * group + g]);
    }
    sum
}
