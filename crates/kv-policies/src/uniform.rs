use kv_core::{Budget, Selection};
use rand::seq::index::sample;
use serde::{Deserialize, Serialize};

use crate::scorers::generator;
use crate::{Needs, Observation, Plan, Policy, PolicyError, Result};

/// Uniform sampling with reweighting, the baseline of BalanceKV: of the `n` tokens between sinks
/// and recents, `m` are drawn without replacement, independently per sequence and key-value head,
/// and carry the weight `n / m` in numerator and denominator. Sinks and recents are exact. Prefill
/// only.
///
/// The paper keeps the first and last 256 tokens exact; by default that is cut to a quarter of the
/// budget each, so that small budgets still sample.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Uniform {
    /// Slots per key-value head, exact ones included.
    pub budget: Budget,
    /// First tokens kept exactly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sinks: Option<usize>,
    /// Last tokens kept exactly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recents: Option<usize>,
}

/// Tokens kept exactly at either end in the paper.
const PAPER_ENDS: usize = 256;

impl Policy for Uniform {
    fn name(&self) -> &'static str {
        "uniform"
    }

    fn config(&self) -> serde_json::Value {
        crate::registry::config_of(self.name(), self)
    }

    fn needs(&self) -> Needs {
        Needs::default()
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        let budget = self.budget.resolve(tokens);
        if budget >= tokens {
            return Ok(Selection::all(batch * kv_heads, tokens).into());
        }
        let sinks = self.sinks.unwrap_or(PAPER_ENDS.min(budget / 4));
        let recents = self.recents.unwrap_or(PAPER_ENDS.min(budget / 4));
        PolicyError::check_protected(self.name(), sinks, recents, budget)?;
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
        Ok(Plan { selection: Selection::new(kept)?, log_weights: Some(log_weights) })
    }
}
