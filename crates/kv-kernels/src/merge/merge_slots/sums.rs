//! A group's sums, and what they make of its slot.

use cubecl::prelude::*;

use super::KeyRule;
use crate::components::sentinels::{LOG_OF_ZERO, MASSLESS_LOG};
use crate::components::softmax::larger;

/// Rounding of logits of about 1.
const ROUNDING: f32 = 4.0 * f32::EPSILON;

/// Sums of a group so far, relative to its largest terms.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Sums {
    /// The largest `ln w`, `w = p ŝ`, and `Σ w`.
    pub(crate) top: f32,
    pub(crate) mass: f32,
    /// `Σ w ln ŝ`.
    pub(crate) logits: f32,
    /// The largest `ln p`, and `Σ p`.
    pub(crate) top_votes: f32,
    pub(crate) votes: f32,
}

/// Adds a member's numbers, and returns what the sums so far and its own row are to be multiplied
/// with.
#[cube]
pub(crate) fn add(sums: &mut Sums, log_weight: f32, log_score: f32) -> (f32, f32) {
    let votes = larger(sums.top_votes, log_weight);
    sums.votes = sums.votes * (sums.top_votes - votes).exp() + (log_weight - votes).exp();
    sums.top_votes = votes;
    let log_mass = log_weight + log_score;
    let mut old = 1.0f32;
    let mut own = 0.0f32;
    if log_mass > f32::new(MASSLESS_LOG) {
        let top = larger(sums.top, log_mass);
        old = (sums.top - top).exp();
        own = (log_mass - top).exp();
        sums.mass = sums.mass * old + own;
        sums.logits = sums.logits * old + own * log_score;
        sums.top = top;
    }
    (old, own)
}

/// Sums of nothing.
#[cube]
pub(crate) fn no_sums() -> Sums {
    Sums {
        top: f32::new(LOG_OF_ZERO),
        mass: 0.0f32,
        logits: 0.0f32,
        top_votes: f32::new(LOG_OF_ZERO),
        votes: 0.0f32,
    }
}

/// What a group's slot is: its key is `factor k̄ + step √D q / ‖q‖²`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Outcome {
    /// Whether no member has any mass, so that means are by votes alone.
    pub(crate) massless: bool,
    pub(crate) factor: f32,
    pub(crate) step: f32,
    /// What the weight makes up for, of what the key's logit lacks.
    pub(crate) excess: f32,
    /// `ln Σp`
    pub(crate) votes: f32,
    /// `ln(Σw / Σp)`
    pub(crate) target: f32,
    /// Whether the guard tripped.
    pub(crate) guarded: bool,
}

/// Makes a slot of a group's sums.
#[cube]
pub(crate) fn outcome(
    sums: &Sums,
    guard: f32,
    #[comptime] rule: KeyRule,
    #[comptime] literal: bool,
) -> Outcome {
    let massless = sums.mass == 0.0f32;
    let votes = sums.top_votes + sums.votes.ln();
    let mut target = f32::new(LOG_OF_ZERO);
    let mut mean_logit = 0.0f32;
    if !massless {
        mean_logit = sums.logits / sums.mass;
        target = sums.top + sums.mass.ln() - votes;
    }
    let mut result = Outcome {
        massless,
        factor: 1.0f32,
        step: 0.0f32,
        excess: 0.0f32,
        votes,
        target,
        guarded: false,
    };
    if !massless {
        if comptime!(rule == KeyRule::Additive) {
            result.step = target - mean_logit;
        }
        if comptime!(rule == KeyRule::Paper) {
            let mut factor = target / mean_logit;
            // Of two logits that are the same but for rounding, the quotient says nothing.
            let size = larger(larger(sums.top.abs(), sums.top_votes.abs()), 1.0f32);
            if (target - mean_logit).abs() <= f32::new(ROUNDING) * size {
                factor = 1.0f32;
            }
            let mut fits = factor >= 1.0f32 / guard && factor <= guard;
            if literal {
                fits = true;
            }
            if fits {
                result.factor = factor;
            } else {
                result.step = target - mean_logit;
                result.guarded = true;
            }
        }
        if comptime!(rule == KeyRule::Votes) {
            result.excess = target - mean_logit;
        }
    }
    result
}

/// Decides what depends on keys and query, of which these are the squares of norms: keys that are
/// all the same stay, whatever their scores; and where the query is too short for its step, as that
/// of a group whose heads cancel, the weight makes up for it.
///
/// `spread` is the sum of the keys' squared distances from the first.
#[cube]
pub(crate) fn settle(
    result: &mut Outcome,
    spread: f32,
    key_square: f32,
    query_square: f32,
    guard: f32,
    scale: f32,
) {
    if spread == 0.0f32 {
        result.factor = 1.0f32;
        result.step = 0.0f32;
        result.excess = 0.0f32;
        result.guarded = false;
    } else if result.step != 0.0f32 {
        let reach = guard * guard * key_square * scale * scale * query_square;
        if query_square == 0.0f32 || result.step * result.step > reach {
            result.excess = result.step;
            result.step = 0.0f32;
        }
    }
}
