//! The attention that shared sets drop (PrHS's CIS): the bound of lemma 9, the tighter one from
//! odds, and the distance of a set from the best one (equation 42).

use kv_kernels::RangeSets;
use kv_policies::certificates::{SharedStep, information_loss};

use super::ROUNDING;
use super::means::{Bound, Means};
use crate::record::metric;

/// A head's step that read a set.
pub(crate) struct SetStep<'a> {
    step: SharedStep,
    own: &'a RangeSets,
}

impl<'a> SetStep<'a> {
    /// The step of a head whose set is an earlier step's, where bounds cover it; `scale` is the one
    /// of logits.
    pub(crate) fn of(own: &'a RangeSets, scale: f64) -> Option<Self> {
        let shares = own.retrieves == Some(false) && own.key_norm > 0.0;
        // It is unknown whether a window hides the tokens that other heads left out, and how far a
        // step that retrieved is from an earlier one.
        let known = own.freed == 0 || own.seen > own.sinks;
        let step = SharedStep {
            dropped: f64::from(own.dropped),
            distance: f64::from(own.distance),
            key_norm: f64::from(own.key_norm),
            scale,
        };
        (shares && known).then_some(Self { step, own })
    }

    /// Takes the `attention` of a query, of which its reads have `mass` and `in_sight` is not
    /// hidden by a window. `block` is given for sets of one size that are this query's alone.
    pub(crate) fn take(
        &self,
        means: &mut Means,
        attention: &[f64],
        [mass, in_sight]: [f64; 2],
        block: Option<usize>,
    ) {
        let dropped = 1.0 - mass / in_sight;
        let (paper, odds) = (self.step.dropped_by_paper(), self.step.dropped_by_odds());
        means.take(metric::DROPPED_MASS, dropped);
        means.take(metric::DROPPED_BOUND, paper);
        means.take(metric::ODDS_BOUND, odds);
        means.judge(Bound::Dropped, dropped, [paper, paper.min(odds)]);
        if let Some(block) = block {
            take_set(means, &self.step, self.own, attention, block);
        }
    }
}

/// Takes the information that a query lost which read `mass` of the attention to so many tokens.
pub(crate) fn take_information_loss(means: &mut Means, mass: f64, tokens: usize) {
    // The bound grows up to there.
    let lost = (1.0 - mass).min(tokens as f64 / (1.0 + tokens as f64));
    let lost = if lost > ROUNDING { lost } else { 0.0 };
    means.take(metric::INFORMATION_LOSS, information_loss(lost, tokens as f64));
}

/// Takes in a head's shared set beside the best that could have been chosen in its place (equation
/// 42).
fn take_set(
    means: &mut Means,
    step: &SharedStep,
    own: &RangeSets,
    attention: &[f64],
    block: usize,
) {
    // Of the tokens that a window hides or that were freed, it is unknown which were chosen and
    // which are neighbours of chosen tokens.
    if own.seen > own.sinks || own.freed > 0 {
        return;
    }
    // Tokens that left the recent ones since the block began were no candidates.
    let behind = own.local.saturating_sub((attention.len() - 1) % block);
    let candidates = &attention[own.sinks.min(behind)..behind];
    let best: f64 = best_of(candidates, own.top).iter().map(|at| candidates[*at]).sum();
    let held: f64 = own.set.iter().map(|token| attention[*token as usize]).sum();
    let bound = step.gap();
    means.take(metric::SET_GAP, (best - held).max(0.0));
    means.take(metric::SET_GAP_BOUND, bound);
    means.judge(Bound::Set, best - held, [bound, bound]);
}

/// The tokens of most attention.
pub(crate) fn best_of(attention: &[f64], count: usize) -> Vec<usize> {
    let mut tokens: Vec<usize> = (0..attention.len()).collect();
    if count < tokens.len() {
        tokens.select_nth_unstable_by(count, |a, b| attention[*b].total_cmp(&attention[*a]));
        tokens.truncate(count);
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A set of tokens 2 and 4 of a block's eleventh step, in blocks of 4: sinks are 0 and 1,
    /// locals the last three, and tokens from 6 on were no candidates when the block began.
    #[test]
    fn gaps_of_sets_are_of_what_was_chosen_from() {
        let own = RangeSets {
            steps: 11,
            retrieved: 1,
            tokens: 0,
            retrieves: Some(false),
            set: vec![2, 4],
            sinks: 2,
            local: 8,
            seen: 2,
            freed: 0,
            top: 2,
            measured: 0.0,
            distance: 0.1,
            key_norm: 1.0,
            dropped: 0.0,
        };
        let attention = [0.1, 0.1, 0.05, 0.1, 0.1, 0.05, 0.2, 0.2, 0.05, 0.03, 0.02];
        let step = SharedStep { dropped: 0.0, distance: 0.1, key_norm: 1.0, scale: 0.1 };
        let of = |step: SharedStep, own: &RangeSets| {
            let mut means = Means::default();
            take_set(&mut means, &step, own, &attention, 4);
            means
        };
        // Tokens 3 and 4 are the best of 2 to 5.
        let near = of(step, &own);
        let [gap, bound] =
            [metric::SET_GAP, metric::SET_GAP_BOUND].map(|name| near.of(name).unwrap());
        assert!((gap - 0.05).abs() < 1e-12 && (bound - 0.04).abs() < 1e-12, "{gap}, {bound}");
        assert_eq!(near.all()[2..], [(metric::VACUOUS, 0.0), (metric::BROKEN, 1.0)]);
        let far = SharedStep { distance: 0.2, ..step };
        assert_eq!(of(far, &own).all()[3], (metric::BROKEN, 0.0));
        assert!(!of(step, &RangeSets { seen: 3, ..own }).bounds(), "a window hides a part");
    }

    #[test]
    fn the_best_are_found() {
        let mut best = best_of(&[0.1, 0.4, 0.0, 0.3, 0.2], 2);
        best.sort_unstable();
        assert_eq!(best, [1, 3]);
        assert_eq!(best_of(&[0.5, 0.5], 3).len(), 2);
    }
}
