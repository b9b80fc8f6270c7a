//! The attention that shared sets drop (PrHS's CIS): the bound of lemma 9, a tighter bound from
//! odds, and the distance of a set from the best set (equation 42).

use std::collections::BTreeMap;

use burn::tensor::{DType, Tensor};
use kv_core::read_f32;
use kv_kernels::RangeSets;
use kv_policies::certificates::{SharedStep, information_loss};

use super::ROUNDING;
use super::means::{Bound, Means};
use crate::record::metric;

/// The numbers of a layer's heads that bounds need, on the host.
pub(crate) struct PromptHeads {
    /// Queries of the decoded tokens, `[Hq, steps, D]`.
    queries: Vec<f32>,
    /// Norms of all tokens' keys, `[Hkv, T]`.
    key_norms: Vec<f32>,
    /// Tokens of the prompt, all tokens, and `D`.
    prompt: usize,
    tokens: usize,
    head_dim: usize,
}

impl PromptHeads {
    /// The numbers of a prompt whose last `steps` tokens are decoded.
    ///
    /// # Shapes
    /// `queries` `[1, Hq, T, D]`, `keys` `[1, Hkv, T, D]`, behind RoPE.
    ///
    /// # Errors
    /// Where the device gives nothing back.
    pub(crate) fn read(
        queries: &Tensor<4>,
        keys: &Tensor<4>,
        steps: usize,
    ) -> anyhow::Result<Self> {
        let [_, _, tokens, head_dim] = queries.dims();
        let prompt = tokens - steps;
        let queries = queries.clone().narrow(2, prompt, steps).cast(DType::F32);
        let keys = keys.clone().cast(DType::F32);
        let key_norms = (keys.clone() * keys).sum_dim(3).sqrt();
        Ok(Self {
            queries: read_f32("queries", queries.flatten::<1>(0, 3))?,
            key_norms: read_f32("norms of keys", key_norms.flatten::<1>(0, 3))?,
            prompt,
            tokens,
            head_dim,
        })
    }

    /// The query of a query head whose token is the `tokens`-th.
    fn query(&self, head: usize, tokens: usize) -> &[f32] {
        let steps = self.tokens - self.prompt;
        let row = head * steps + tokens - self.prompt - 1;
        &self.queries[row * self.head_dim..][..self.head_dim]
    }

    /// The largest norm of the keys of these tokens of a key-value head.
    fn largest_key(&self, kv_head: usize, of: impl Iterator<Item = usize>) -> f64 {
        let norms = &self.key_norms[kv_head * self.tokens..][..self.tokens];
        of.map(|token| f64::from(norms[token])).fold(0.0, f64::max)
    }

    /// The factor of `q . k` in a logit.
    fn scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }
}

/// A query's step.
pub(crate) struct QueryStep<'a> {
    /// The query head, and its key-value head.
    pub(crate) head: usize,
    pub(crate) kv_head: usize,
    /// The sets of its head range after the step.
    pub(crate) own: &'a RangeSets,
    /// The number of first tokens in sight, and the token from which on all tokens are in sight.
    pub(crate) in_sight: [usize; 2],
    /// Its attention to all tokens so far.
    pub(crate) attention: &'a [f64],
    /// The tokens that it read.
    pub(crate) read: &'a [usize],
}

impl QueryStep<'_> {
    fn tokens(&self) -> usize {
        self.attention.len()
    }

    /// Whether it is known which tokens are in sight: not whether a window hides tokens that other
    /// heads left out.
    fn sees_known(&self) -> bool {
        self.own.freed == 0 || self.own.seen > self.own.sinks
    }

    /// The tokens in sight.
    fn seen(&self) -> impl Iterator<Item = usize> {
        let [sinks, seen] = self.in_sight;
        (0..sinks.min(seen)).chain(seen..self.tokens())
    }
}

/// The queries that retrieved the sets of a layer's block, by query head and the set's number.
#[derive(Default)]
pub(crate) struct Retrievals(BTreeMap<(usize, usize), Retrieval>);

/// A query that retrieved a set.
struct Retrieval {
    /// Tokens by then.
    tokens: usize,
    /// The share of attention that it gave to each token in sight, which are 1 together.
    shares: Vec<f64>,
    /// The largest norm of a key in sight.
    key_norm: f64,
}

impl Retrievals {
    /// Notes a step that retrieves. Of a step that shares, returns the numbers that bounds need;
    /// `None` where no bound covers the step.
    pub(crate) fn follow(
        &mut self,
        heads: &PromptHeads,
        step: &QueryStep<'_>,
    ) -> Option<SharedStep> {
        let number = step.own.number?;
        let key = (step.head, number);
        if step.own.retrieves? {
            self.0.remove(&key);
            if step.sees_known() {
                let mut shares = vec![0.0; step.tokens()];
                let mass: f64 = step.seen().map(|token| step.attention[token]).sum();
                step.seen().for_each(|token| shares[token] = step.attention[token] / mass);
                let key_norm = heads.largest_key(step.kv_head, step.seen());
                self.0.insert(key, Retrieval { tokens: step.tokens(), shares, key_norm });
            }
            return None;
        }
        let retrieval = self.0.get(&key)?;
        // A token that came since, and that the step does not read, is in no bound.
        let reads_later = step.own.local + step.own.freed <= retrieval.tokens;
        if !(step.sees_known() && reads_later) {
            return None;
        }
        let kept = step.read.iter().filter_map(|token| retrieval.shares.get(*token));
        let [own, set] =
            [step.tokens(), retrieval.tokens].map(|tokens| heads.query(step.head, tokens));
        let distance = own.iter().zip(set).map(|(a, b)| f64::from(a - b).powi(2));
        Some(SharedStep {
            dropped: (1.0 - kept.sum::<f64>()).max(0.0),
            distance: distance.sum::<f64>().sqrt(),
            key_norm: retrieval.key_norm,
            scale: heads.scale(),
        })
    }
}

/// Takes a step that shares a set beside its bounds. `block` is given for sets of one size that are
/// this query's alone.
pub(crate) fn take_shared(
    means: &mut Means,
    shared: &SharedStep,
    step: &QueryStep<'_>,
    block: Option<usize>,
) {
    let mass = |of: &mut dyn Iterator<Item = usize>| of.map(|token| step.attention[token]).sum();
    let [read, in_sight]: [f64; 2] = [mass(&mut step.read.iter().copied()), mass(&mut step.seen())];
    let dropped = 1.0 - read / in_sight;
    let (paper, odds) = (shared.dropped_by_paper(), shared.dropped_by_odds());
    means.take(metric::DROPPED_MASS, dropped);
    means.take(metric::DROPPED_BOUND, paper);
    means.take(metric::ODDS_BOUND, odds);
    means.judge(Bound::Dropped, dropped, [paper, paper.min(odds)]);
    if let Some(block) = block {
        take_set(means, shared, step.own, step.attention, block);
    }
}

/// Takes the information that a query lost which read `mass` of the attention to so many tokens.
pub(crate) fn take_information_loss(means: &mut Means, mass: f64, tokens: usize) {
    // The bound grows up to there.
    let lost = (1.0 - mass).min(tokens as f64 / (1.0 + tokens as f64));
    let lost = if lost > ROUNDING { lost } else { 0.0 };
    means.take(metric::INFORMATION_LOSS, information_loss(lost, tokens as f64));
}

/// Takes a head's shared set, beside the best set that it could have had (equation 42).
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
    means.take(metric::ORACLE_GAP_IN_SET, (best - held).max(0.0));
    means.take(metric::ORACLE_GAP_IN_SET_BOUND, bound);
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
            number: Some(0),
            set: vec![2, 4],
            sinks: 2,
            local: 8,
            seen: 2,
            freed: 0,
            top: 2,
            measured: 0.0,
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
        let [gap, bound] = [metric::ORACLE_GAP_IN_SET, metric::ORACLE_GAP_IN_SET_BOUND]
            .map(|name| near.of(name).unwrap());
        assert!((gap - 0.05).abs() < 1e-12 && (bound - 0.04).abs() < 1e-12, "{gap}, {bound}");
        assert_eq!(near.all()[2..], [(metric::BOUND_GT_1_SHARE, 0.0), (metric::BROKEN, 1.0)]);
        let far = SharedStep { distance: 0.2, ..step };
        assert_eq!(of(far, &own).all()[3], (metric::BROKEN, 0.0));
        assert!(!of(step, &RangeSets { seen: 3, ..own }).bounds(), "a window hides a part");
    }

    /// A query that retrieves tokens 1 and 2 of four, and one that shares them a step later, at a
    /// distance of 0.5. Token 0 is a sink.
    #[test]
    fn shared_steps_are_measured_from_the_retrieving_query() {
        let heads = PromptHeads {
            queries: vec![0.3, 0.4, 0.0, 0.0],
            key_norms: vec![1.0, 3.0, 2.0, 1.0, 9.0],
            prompt: 3,
            tokens: 5,
            head_dim: 2,
        };
        let own = |retrieves: bool, local: usize| RangeSets {
            steps: 1,
            retrieved: 1,
            tokens: 0,
            retrieves: Some(retrieves),
            number: Some(0),
            set: vec![1, 2],
            sinks: 1,
            local,
            seen: 1,
            freed: 0,
            top: 2,
            measured: 0.0,
        };
        let mut retrievals = Retrievals::default();
        let mut follow = |own: &RangeSets, attention: &[f64], read: &[usize]| {
            let step = QueryStep { head: 0, kv_head: 0, own, in_sight: [0, 0], attention, read };
            retrievals.follow(&heads, &step)
        };
        assert_eq!(follow(&own(false, 4), &[0.2; 5], &[0]), None, "the set is unknown");
        assert_eq!(follow(&own(true, 3), &[0.1, 0.4, 0.3, 0.2], &[0, 1, 2]), None);
        let shared = follow(&own(false, 4), &[0.2; 5], &[0, 1, 2, 4]).unwrap();
        assert!((shared.dropped - 0.2).abs() < 1e-12, "{shared:?}");
        assert!((shared.distance - 0.5).abs() < 1e-6, "{shared:?}");
        assert_eq!(shared.key_norm, 3.0);
        assert!((shared.scale - 0.5f64.sqrt()).abs() < 1e-12, "{shared:?}");
        assert_eq!(follow(&own(false, 5), &[0.2; 5], &[0, 1, 2]), None, "a later token is left");
    }

    #[test]
    fn the_best_are_found() {
        let mut best = best_of(&[0.1, 0.4, 0.0, 0.3, 0.2], 2);
        best.sort_unstable();
        assert_eq!(best, [1, 3]);
        assert_eq!(best_of(&[0.5, 0.5], 3).len(), 2);
    }
}
