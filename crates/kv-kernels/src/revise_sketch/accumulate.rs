//! Adding a step's probabilities to all scores: by a kernel of its own where there are many tokens, else
//! as the beginning of the one that moves them.

use cubecl::prelude::*;

use crate::count_sketch::HEAD_FIELDS;
use crate::decode_attention::shared::weight_of;
use crate::evicting_attention::weigh::{NOWHERE, weakest_of};

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
    let seen = min(last + 1i32, heads[head + 3]) as usize;

    let start = offsets[pair] as usize;
    let length = lengths[pair] as usize;
    let mut i = of * units + unit;
    while i < length {
        let slot = start + i;
        let position = positions[slot];
        let mut row = slot;
        if comptime!(blueprint.by_token) {
            row = first_token + position as usize;
        }
        let own = mass(slot_logits, log_sum_exp, row, pair, group);
        // A new token begins with what this step gives it.
        slot_scores[slot] = select(position == last, own, slot_scores[slot] + own);
        i += parts * units;
    }

    // Negated, so that the least is found.
    let mut best = 1.0f32;
    let mut best_at = i32::new(NOWHERE as i64);
    let end = min((of + 1) * part, seen);
    let mut token = of * part + unit;
    while token < end {
        let at = first_token + token;
        let mut score = token_scores[at];
        if score >= 0.0f32 {
            score += mass(token_logits, log_sum_exp, at, pair, group);
            token_scores[at] = score;
            if -score < best {
                best = -score;
                best_at = i32::cast_from(token);
            }
        }
        token += units;
    }
    weakest_of(best, best_at, blueprint.planes)
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
