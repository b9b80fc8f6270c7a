//! What policies have read beside the best that they could have read, and certificates of those
//! that keep more than they read.

use kv_core::{LayerCache, RangeSets};
use kv_policies::certificates::{SharedStep, information_loss};
use kv_policies::{LayerContext, Policy};

use super::ROUNDING;
use super::means::{Bound, Means};
use super::purpose::Purpose;
use super::windows::Hidden;
use crate::record::metric;

/// The reads of a query head.
#[derive(Clone, Default)]
pub(super) struct Reading {
    /// Means over its steps.
    pub(super) means: Means,
    /// What windows hid from it.
    pub(super) hidden: Hidden,
}

/// The attention of a step over the full cache.
pub(super) struct Exact<'a> {
    /// `[pairs * capacity, G]`, a head's tokens in order.
    pub(super) probabilities: &'a [f32],
    pub(super) capacity: usize,
    /// Tokens so far.
    pub(super) tokens: usize,
    /// The prompt's purpose.
    pub(super) purpose: Purpose,
    /// Whether policies that read all they keep are looked at, too: the attention that a choice of
    /// as many tokens would have kept beyond theirs is equation (6) of PrHS.
    pub(super) all: bool,
}

impl Exact<'_> {
    /// A head's attention, from the query `query` of its group.
    fn of(&self, pair: usize, group: usize, query: usize) -> Vec<f64> {
        let token = |token: usize| (pair * self.capacity + token) * group + query;
        (0..self.tokens).map(|at| f64::from(self.probabilities[token(at)])).collect()
    }
}

/// Takes a step of all `heads` in, which are by query head and none as yet; whether there was
/// anything to take in. `block` is what sets are shared within, where they are of the highest sums:
/// see [`crate::contenders::Contender::block_of_sums`].
///
/// # Errors
/// Where the device gives nothing back.
pub(super) fn take(
    heads: &mut Vec<Reading>,
    (policy, layer): (&dyn Policy, LayerContext),
    cache: &LayerCache,
    positions: &[i32],
    exact: &Exact<'_>,
    budget: usize,
    block: Option<usize>,
) -> anyhow::Result<bool> {
    let Exact { probabilities, capacity, tokens, purpose, all } = *exact;
    let attended = match policy.attended(layer, cache)? {
        Some(attended) => attended,
        None if all => (0..cache.layout().pairs())
            .map(|pair| (0..cache.layout().live(pair).len()).collect())
            .collect(),
        None => return Ok(false),
    };
    // Of tokens that others left out it is not known whether a window hides them, nor of steps that
    // retrieved how far they are from anything.
    let known = |own: &&RangeSets| own.freed == 0 || own.seen > own.sinks;
    let shares = |own: &&RangeSets| own.retrieves == Some(false) && own.key_norm > 0.0;
    let layout = cache.layout();
    let group = probabilities.len() / capacity / layout.pairs();
    let each = attended.len() / layout.pairs();
    heads.resize(layout.pairs() * group, Reading::default());
    let sets = cache.index_sets().map(|sets| sets.read()).transpose()?;
    let scale = 1.0 / (cache.head_dim() as f64).sqrt();
    for (range, slots) in attended.iter().enumerate() {
        let pair = range / each;
        let first = layout.live(pair).start;
        let read: Vec<usize> = slots.iter().map(|slot| positions[first + slot] as usize).collect();
        let mut read_at = vec![false; tokens];
        read.iter().for_each(|token| read_at[*token] = true);
        let own = sets.as_ref().map(|sets| &sets[range]);
        // First tokens in sight, and the one from which on all others are.
        let (sinks, seen) = match own {
            Some(own) if own.seen > own.sinks => (own.sinks, own.seen + own.freed),
            None if policy.name() == "psaw" => window_of(&read),
            _ => (0, 0),
        };
        let step = own.filter(shares).filter(known).map(|own| SharedStep {
            dropped: f64::from(own.dropped),
            distance: f64::from(own.distance),
            key_norm: f64::from(own.key_norm),
            scale,
        });
        // The queries that read this list.
        let queries = if each == 1 { 0..group } else { range % each..range % each + 1 };
        // Heads that share a set give the tokens since then different shares, so that what was best
        // together need not be any more.
        let alone = queries.len() == 1;
        for query in queries {
            let Reading { means, hidden } = &mut heads[pair * group + query];
            let attention = exact.of(pair, group, query);
            let mass: f64 = read.iter().map(|token| attention[*token]).sum();
            means.take(metric::RETAINED_MASS, mass);
            let best: f64 = best_of(&attention, read.len()).iter().map(|at| attention[*at]).sum();
            means.take(metric::ORACLE_GAP, best - mass);
            let wanted = best_of(&attention, budget);
            let found = wanted.iter().filter(|at| read_at[**at]).count();
            means.take(metric::OVERLAP, found as f64 / wanted.len().max(1) as f64);
            // The bound grows up to there.
            let lost = (1.0 - mass).min(tokens as f64 / (1.0 + tokens as f64));
            let lost = if lost > ROUNDING { lost } else { 0.0 };
            means.take(metric::INFORMATION_LOSS, information_loss(lost, tokens as f64));
            hidden.take(&attention, [sinks, seen], purpose);
            let Some(step) = &step else { continue };
            let in_sight = 1.0 - attention[sinks.min(seen)..seen].iter().sum::<f64>();
            let dropped = 1.0 - mass / in_sight;
            let (paper, odds) = (step.dropped_by_paper(), step.dropped_by_odds());
            means.take(metric::DROPPED_MASS, dropped);
            means.take(metric::DROPPED_BOUND, paper);
            means.take(metric::ODDS_BOUND, odds);
            means.judge(Bound::Dropped, dropped, [paper, paper.min(odds)]);
            if let (Some(own), Some(block), true) = (own, block, alone) {
                take_set(means, step, own, &attention, block);
            }
        }
    }
    Ok(true)
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
    // Of what has gone out of sight, it is not known how much was chosen and how much were
    // neighbours.
    if own.seen > own.sinks || own.freed > 0 {
        return;
    }
    // What left the locals since the block began was no candidate.
    let behind = own.local.saturating_sub((attention.len() - 1) % block);
    let candidates = &attention[own.sinks.min(behind)..behind];
    let best: f64 = best_of(candidates, own.top).iter().map(|at| candidates[*at]).sum();
    let held: f64 = own.set.iter().map(|token| attention[*token as usize]).sum();
    let bound = step.gap();
    means.take(metric::SET_GAP, (best - held).max(0.0));
    means.take(metric::SET_GAP_BOUND, bound);
    means.judge(Bound::Set, best - held, [bound, bound]);
}

/// Of the tokens that are read through a window, how many first ones there are before the gap, and
/// the first one behind.
fn window_of(read: &[usize]) -> (usize, usize) {
    let sinks = read.iter().zip(0..).take_while(|(token, at)| **token == *at).count();
    (sinks, read.get(sinks).copied().unwrap_or(sinks))
}

/// The tokens of most attention.
fn best_of(attention: &[f64], count: usize) -> Vec<usize> {
    let mut tokens: Vec<usize> = (0..attention.len()).collect();
    if count < tokens.len() {
        tokens.select_nth_unstable_by(count, |a, b| attention[*b].total_cmp(&attention[*a]));
        tokens.truncate(count);
    }
    tokens
}

#[cfg(test)]
mod tests {
    use kv_core::RangeSets;
    use kv_policies::certificates::SharedStep;

    use super::{Means, best_of, take_set, window_of};
    use crate::record::metric;

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
    fn the_best_and_windows_are_found() {
        let mut best = best_of(&[0.1, 0.4, 0.0, 0.3, 0.2], 2);
        best.sort_unstable();
        assert_eq!(best, [1, 3]);
        assert_eq!(best_of(&[0.5, 0.5], 3).len(), 2);
        assert_eq!(window_of(&[0, 1, 2, 7, 8]), (3, 7));
        assert_eq!(window_of(&[0, 1, 2]), (3, 3), "nothing is hidden");
    }
}
