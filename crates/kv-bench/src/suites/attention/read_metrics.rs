//! The tokens that policies read of a step, beside the best that they could have read.

use kv_core::LayerCache;
use kv_policies::{CisIndex, LayerContext, Policy};

use crate::certificates::{
    FitCheck, HiddenMass, Means, PromptHeads, QueryStep, Retrievals, best_of,
    take_information_loss, take_shared,
};
use crate::record::metric;

/// The reads of a query head.
#[derive(Clone, Default)]
pub(super) struct ReadMetrics {
    /// Means over its steps.
    pub(super) means: Means,
    /// The attention that windows hid from it.
    pub(super) hidden: HiddenMass,
}

/// The attention of a step over the full cache.
pub(super) struct Exact<'a> {
    /// `[pairs * capacity, G]`, a head's tokens in order.
    pub(super) probabilities: &'a [f32],
    pub(super) capacity: usize,
    /// Tokens so far.
    pub(super) tokens: usize,
    /// Whether constants of bounds are fitted to the prompt, or bounds checked on it.
    pub(super) fit_check: FitCheck,
    /// The numbers of the layer's heads that certificates need; `None` without certificates. With
    /// them, policies that read all tokens they keep are measured too: their distance from the best
    /// choice of as many tokens is equation (6) of PrHS.
    pub(super) heads: Option<&'a PromptHeads>,
}

impl Exact<'_> {
    /// A head's attention, from the query `query` of its group.
    fn of(&self, pair: usize, group: usize, query: usize) -> Vec<f64> {
        let token = |token: usize| (pair * self.capacity + token) * group + query;
        (0..self.tokens).map(|at| f64::from(self.probabilities[token(at)])).collect()
    }
}

/// Adds a step to the metrics of all query heads, `heads`, which is filled at the first step, and
/// follows the sets that it retrieves or shares. Returns whether the policy told which tokens it
/// read. `block` is the number of steps that share a set, where sets are the tokens of the highest
/// sums: see [`kv_policies::Capabilities::block_of_sums`].
///
/// # Errors
/// Where the device gives nothing back.
pub(super) fn take(
    (heads, retrievals): (&mut Vec<ReadMetrics>, &mut Retrievals),
    (policy, layer): (&dyn Policy, LayerContext),
    cache: &LayerCache,
    positions: &[i32],
    exact: &Exact<'_>,
    budget: usize,
    block: Option<usize>,
) -> anyhow::Result<bool> {
    let Exact { probabilities, capacity, tokens, fit_check, heads: certified } = *exact;
    let attended = match policy.last_attended(layer, cache)? {
        Some(attended) => attended,
        None if certified.is_some() => (0..cache.layout().head_ranges())
            .map(|pair| (0..cache.layout().live(pair).len()).collect())
            .collect(),
        None => return Ok(false),
    };
    let layout = cache.layout();
    let group = probabilities.len() / capacity / layout.head_ranges();
    let each = attended.len() / layout.head_ranges();
    heads.resize(layout.head_ranges() * group, ReadMetrics::default());
    let sets = cache.policy_state::<CisIndex>();
    let sets = sets.map(|index| index.sets().read()).transpose()?;
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
            None if policy.visible_window(layer).is_some() => window_of(&read),
            _ => (0, 0),
        };
        // The queries that read this list.
        let queries = if each == 1 { 0..group } else { range % each..range % each + 1 };
        // The bound on a set covers sets of a single query. Queries that share a set change their
        // attention apart, so that the tokens that were best for all of them need not stay best.
        let alone = queries.len() == 1;
        for query in queries {
            let ReadMetrics { means, hidden } = &mut heads[pair * group + query];
            let attention = exact.of(pair, group, query);
            let mass: f64 = read.iter().map(|token| attention[*token]).sum();
            means.take(metric::RETAINED_MASS, mass);
            let best: f64 = best_of(&attention, read.len()).iter().map(|at| attention[*at]).sum();
            means.take(metric::ORACLE_GAP, best - mass);
            let wanted = best_of(&attention, budget);
            let found = wanted.iter().filter(|at| read_at[**at]).count();
            means.take(metric::OVERLAP, found as f64 / wanted.len().max(1) as f64);
            take_information_loss(means, mass, tokens);
            hidden.take(&attention, [sinks, seen], fit_check);
            if let (Some(own), Some(certified)) = (own, certified) {
                let step = QueryStep {
                    head: pair * group + query,
                    kv_head: pair,
                    own,
                    in_sight: [sinks, seen],
                    attention: &attention,
                    read: &read,
                };
                if let Some(shared) = retrievals.follow(certified, &step) {
                    take_shared(means, &shared, &step, block.filter(|_| alone));
                }
            }
        }
    }
    Ok(true)
}

/// The gap in the tokens that are read through a window: the number of tokens before it, and the
/// first token behind it.
fn window_of(read: &[usize]) -> (usize, usize) {
    let sinks = read.iter().zip(0..).take_while(|(token, at)| **token == *at).count();
    (sinks, read.get(sinks).copied().unwrap_or(sinks))
}

#[cfg(test)]
mod tests {
    use super::window_of;

    #[test]
    fn windows_are_found() {
        assert_eq!(window_of(&[0, 1, 2, 7, 8]), (3, 7));
        assert_eq!(window_of(&[0, 1, 2]), (3, 3), "nothing is hidden");
    }
}
