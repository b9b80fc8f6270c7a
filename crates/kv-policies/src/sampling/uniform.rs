//! Uniform sampling, BalanceKV's baseline (<https://arxiv.org/abs/2502.07861>): tokens between
//! sinks and recents are drawn and reweighted. [`Policy::select`] is the draw.

use std::sync::Arc;

use kv_core::{Budget, Selection};
use rand::seq::index::sample;
use serde::{Deserialize, Serialize};

use crate::policy::config::{Config, config_of};
use crate::policy::generator::generator;
use crate::sampling::exact_ends::exact_ends;
use crate::{Capabilities, Observation, Plan, Policy, Result, SlotWeights};

/// Uniform sampling with reweighting, the baseline of BalanceKV: of the `n` tokens between sinks
/// and recents, `m` are drawn without replacement, independently per sequence and key-value head,
/// and carry the weight `n / m` in numerator and denominator. Sinks and recents are exact. Prefill
/// only.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Uniform {
    /// Slots per key-value head, exact ones included.
    pub budget: Budget,
    /// First tokens kept exactly; the paper's 256 by default, a quarter of the budget at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sinks: Option<usize>,
    /// Last tokens kept exactly; the paper's 256 by default, a quarter of the budget at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recents: Option<usize>,
}

impl Uniform {
    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        Ok(Arc::new(config.take_all::<Self>("uniform")?))
    }
}

impl Policy for Uniform {
    fn name(&self) -> &'static str {
        "uniform"
    }

    fn config(&self) -> serde_json::Value {
        config_of(self.name(), self)
    }

    fn budget(&self) -> Option<Budget> {
        Some(self.budget)
    }

    fn capabilities(&self) -> Capabilities {
        let weights = SlotWeights { weighted: true, numerators: false };
        Capabilities { draws: true, weights, ..Capabilities::default() }
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        let budget = self.budget.resolve(tokens);
        if budget >= tokens {
            return Ok(Plan::whole(observation));
        }
        let [sinks, recents] =
            exact_ends(self.name(), [self.sinks, self.recents], self.budget, budget)?;
        let drawn = budget - sinks - recents;
        let middle = tokens - sinks - recents;
        let weight = if drawn > 0 { (middle as f32 / drawn as f32).ln() } else { 0.0 };
        let mut kept = Vec::with_capacity(batch * kv_heads);
        let mut log_weights = Vec::with_capacity(batch * kv_heads * budget);
        for row in 0..batch {
            for head in 0..kv_heads {
                let mut draws = generator(observation, row, head);
                let mut chosen: Vec<u32> = sample(&mut draws, middle, drawn)
                    .iter()
                    .map(|index| (sinks + index) as u32)
                    .collect();
                chosen.sort_unstable();
                let first = 0..sinks as u32;
                let last = (tokens - recents) as u32..tokens as u32;
                log_weights.extend(std::iter::repeat_n(0.0, sinks));
                log_weights.extend(std::iter::repeat_n(weight, drawn));
                log_weights.extend(std::iter::repeat_n(0.0, recents));
                kept.push(first.chain(chosen).chain(last).collect());
            }
        }
        let selection = Selection::new(kept)?;
        Ok(Plan { selection, log_weights: Some(log_weights), numerators: None })
    }
}
