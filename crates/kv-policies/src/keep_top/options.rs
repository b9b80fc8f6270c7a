//! Options that all policies of the family take.

use kv_core::{Budget, HeadAllocation, LayerAllocation};
use serde::{Deserialize, Serialize};

use crate::policy::ends::first_tokens;
use crate::{LayerContext, Observation, Result, Scorer};

/// Options that every policy of the family takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeepTopConfig {
    /// Slots per key-value head, protected ones included.
    pub budget: Budget,
    /// First tokens that are always kept; `None` takes the paper's number, but at most a quarter of
    /// the budget. Where an observation window is cut, `None` takes at least 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sinks: Option<usize>,
    /// Last tokens that are always kept; `None` takes `recent_share` of the budget.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recents: Option<usize>,
    /// Share of the budget for the last tokens, where `recents` is not given.
    pub recent_share: f64,
    /// Decode steps between evictions; the cache holds up to `interval` slots more in between.
    pub interval: usize,
    /// Whether the scorer acts during decode too, if it can; without, decoded tokens accumulate.
    pub decode: bool,
    /// How layers share the budget.
    pub layers: LayerAllocation,
    /// How key-value heads share it (prefill only).
    pub heads: HeadAllocation,
}

impl KeepTopConfig {
    /// The family's options as `S`'s paper has them.
    pub fn of<S: Scorer>(budget: Budget) -> Self {
        let defaults = S::defaults();
        Self {
            budget,
            sinks: None,
            recents: None,
            recent_share: defaults.recent_share,
            interval: defaults.interval,
            decode: true,
            layers: LayerAllocation::Uniform,
            heads: HeadAllocation::Uniform,
        }
    }

    /// Slots per head of one layer.
    pub(super) fn layer_budget<S: Scorer>(
        &self,
        scorer: &S,
        observation: &Observation<'_>,
    ) -> Result<usize> {
        let tokens = observation.tokens();
        self.share_of(scorer, observation.layer, self.budget.resolve(tokens), tokens)
    }

    /// Slots that a head may hold during decode: token budgets fill up even after short prompts.
    pub(super) fn decode_budget<S: Scorer>(
        &self,
        scorer: &S,
        observation: &Observation<'_>,
    ) -> Result<usize> {
        match self.budget {
            Budget::Tokens(count) => self.share_of(scorer, observation.layer, count, usize::MAX),
            Budget::Ratio(_) => self.layer_budget(scorer, observation),
        }
    }

    /// A layer's slots per head, at most `tokens`, where the mean over layers is `base`.
    fn share_of<S: Scorer>(
        &self,
        scorer: &S,
        layer: LayerContext,
        base: usize,
        tokens: usize,
    ) -> Result<usize> {
        let window = scorer.fitted(base).window().max(1);
        let spread = self.layers.spread(layer.count, base, window, tokens)?;
        Ok(spread[layer.index])
    }

    /// Protected first tokens under a budget.
    pub(super) fn sinks_of<S: Scorer>(&self, scorer: &S, budget: usize) -> usize {
        let cut = scorer.fitted(budget).window() < scorer.window();
        let kept = if cut { first_tokens(budget) } else { 0 };
        self.sinks.unwrap_or(S::defaults().sinks.min(budget / 4).max(kept))
    }

    /// Protected last tokens under a budget.
    pub(super) fn recents_of(&self, budget: usize) -> usize {
        self.recents.unwrap_or((budget as f64 * self.recent_share) as usize)
    }
}
