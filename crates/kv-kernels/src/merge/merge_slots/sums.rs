//! The sums of a group of slots, and the merged slot's key, weight and score that follow from them.

use cubecl::prelude::*;

use super::KeyRule;
use crate::components::sentinels::{LOG_OF_ZERO, MASSLESS_LOG};
use crate::components::softmax::larger;

/// The rounding error of logits of about 1.
const ROUNDING: f32 = 4.0 * f32::EPSILON;

/// A group's sums so far, relative to its largest terms.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Sums {
    /// The largest `ln w`, with `w = p ŝ`; and `Σ w`.
    pub(crate) top: f32,
    pub(crate) mass: f32,
    /// `Σ w ln ŝ`.
    pub(crate) logits: f32,
    /// The largest `ln p`; and `Σ p`.
    pub(crate) top_votes: f32,
    pub(crate) votes: f32,
}

/// Adds a member. Returns the factors of the weighted rows so far, and of the member's own row.
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

/// The sums of an empty group.
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

/// A group's merged slot. Its key is `factor k̄ + step √D q / ‖q‖²`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Outcome {
    /// Whether no member has mass, so that means are weighted by `p` alone.
    pub(crate) massless: bool,
    pub(crate) factor: f32,
    pub(crate) step: f32,
    /// The part of the logit that the slot's weight makes up for.
    pub(crate) excess: f32,
    /// `ln Σp`
    pub(crate) votes: f32,
    /// `ln(Σw / Σp)`
    pub(crate) target: f32,
    /// Whether the guard tripped.
    pub(crate) guarded: bool,
}

/// Derives the merged slot from a group's sums.
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
            // Where two logits differ by rounding alone, their quotient is meaningless.
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

/// Settles what depends on keys and query, given their squared norms. Where all keys are equal, the
/// key stays, whatever the scores. Where the query is too short for the step, as in a group whose
/// heads cancel, the weight makes up for it.
///
/// `spread` is the sum of the keys' squared distances from the first key.
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
