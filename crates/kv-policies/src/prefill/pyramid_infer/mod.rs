//! PyramidInfer's choice of a prompt's tokens. The submodule has generated tokens.

mod generated;

use std::sync::Arc;

use burn::tensor::Tensor;
use kv_core::{Budget, LayerAllocation, LayerCache, Room, Selection, read_f32, top};
use serde::{Deserialize, Serialize};

use crate::policy::attention_scores::{LAST_WEIGHT, recent_attention};
use crate::policy::check::Check;
use crate::policy::config::{Config, config_of};
use crate::{
    Capabilities, LayerContext, Needs, Observation, Plan, Policy, Result, StepAttention, StepPlan,
    StepUpdate,
};

/// PyramidInfer (Yang et al., 2024, section 4): hidden states are pruned between layers during
/// prefill, so that deeper layers neither compute nor store the dropped tokens. A token's score is
/// the attention of the most recent queries, weighted towards the last (1 to 1.2), averaged over
/// all heads; all heads of a layer keep the same tokens. The first 4 tokens always stay.
///
/// The paper fixes a decay, not a budget: with `gamma` alone, the tokens before the recents shrink
/// by the cosine schedule `gamma + (1 - gamma) (1 + cos(pi l / N)) / 2` from layer to layer
/// (compounding), and a layer's own cache is cut by the decision of the layer before. With
/// `budget`, the layers share it along the same cosine, their mean is the budget exactly, and each
/// layer's own cache is cut by its own decision.
///
/// During decode the prompt's tokens stay as they are. Whenever 16 generated ones have left the
/// recents (a share of the first layer's length), they shrink to
/// `16 * 0.9 * (0.1 + 0.9 (1 + cos(pi l / N)) / 2)`, by the attention of the recents at their own
/// steps. Such a step reads scores to the host.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PyramidInfer {
    /// Mean slots per key-value head over the layers; `None` for the paper's schedule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// How far the schedule falls. By default 0.9 without a budget, the paper's number for 7B
    /// models, whose schedule compounds; 0.4 under a budget, the deepest layer's share, which the
    /// compounding schedule reaches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gamma: Option<f64>,
    /// Share of the prompt (paper) or of the layer's slots (budget) that are recents.
    pub recent_ratio: f64,
    /// Whether generated tokens shrink.
    pub decode: bool,
}

impl Default for PyramidInfer {
    fn default() -> Self {
        Self { budget: None, gamma: None, recent_ratio: 0.2, decode: true }
    }
}

const NAME: &str = "pyramidinfer";
/// First tokens that always stay.
const SINKS: usize = 4;
/// The paper's code prunes no layer below this many tokens.
const LEAST: usize = 64;

impl PyramidInfer {
    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`] for ratios outside `[0, 1]`.
    pub fn validate(&self) -> Result<()> {
        Check(NAME).share("gamma", self.gamma())?;
        Check(NAME).share("recent_ratio", self.recent_ratio)
    }

    fn gamma(&self) -> f64 {
        self.gamma.unwrap_or(if self.budget.is_some() { 0.4 } else { 0.9 })
    }

    /// Tokens that each layer keeps in its cache.
    pub fn schedule(&self, prompt_tokens: usize, layers: usize) -> Result<Vec<usize>> {
        if let Some(budget) = self.budget {
            let base = budget.resolve(prompt_tokens);
            let cosine = LayerAllocation::Cosine { gamma: self.gamma() };
            return Ok(cosine.spread(layers, base, base.min(1), prompt_tokens)?);
        }
        let recents = (prompt_tokens as f64 * self.recent_ratio) as usize;
        let mut entering = prompt_tokens;
        let mut schedule = Vec::with_capacity(layers);
        for layer in 0..layers {
            schedule.push(entering);
            let context = entering.saturating_sub(1 + recents);
            let ratio = cosine(self.gamma(), LayerContext { index: layer, count: layers });
            let kept = (context as f64 * ratio) as usize;
            let least = LEAST.min(prompt_tokens.saturating_sub(1 + recents));
            if kept > least {
                entering = kept + 1 + recents;
            }
        }
        Ok(schedule)
    }

    /// Recents of a layer that keeps `kept` tokens.
    fn recents(&self, observation: &Observation<'_>, kept: usize) -> usize {
        let of = if self.budget.is_some() { kept } else { observation.prompt_tokens };
        ((of as f64 * self.recent_ratio) as usize).min(kept.saturating_sub(1))
    }

    /// The best `kept` tokens of each sequence.
    fn best(&self, observation: &Observation<'_>, kept: usize) -> Result<Vec<Vec<u32>>> {
        let [batch, _, tokens, _] = observation.dims();
        if kept >= tokens {
            return Ok(vec![(0..tokens as u32).collect(); batch]);
        }
        let recents = self.recents(observation, kept);
        let scores = read_f32("scores", self.score(observation, recents + 1)?)?;
        let best = scores.chunks(tokens).map(|scores| {
            let mut scores = scores.to_vec();
            scores[..SINKS.min(tokens)].fill(f32::INFINITY);
            // Recents come first: at tiny budgets they displace sinks.
            let past = tokens - recents - 1;
            let mut chosen = top(&scores[..past], kept - recents - 1);
            chosen.extend(past as u32..tokens as u32);
            chosen
        });
        Ok(best.collect())
    }

    /// Weighted mean of the last `rows` queries' attention, averaged over heads, `[B, T]`.
    fn score(&self, observation: &Observation<'_>, rows: usize) -> Result<Tensor<2>> {
        let scores = observation.once(&format!("{NAME} {rows}"), || {
            let queries = observation.last_queries(NAME, rows)?;
            Ok(recent_attention(&queries, observation.keys, LAST_WEIGHT)?.mean_dim(1))
        })?;
        Ok(scores.squeeze_dim(1))
    }

    /// Tokens of the prompt, and how many of them the first layer keeps.
    fn prompt_sizes(&self, observation: &Observation<'_>) -> Result<[usize; 2]> {
        let schedule = self.schedule(observation.prompt_tokens, observation.layer.count)?;
        Ok([observation.prompt_tokens, schedule[0]])
    }

    fn kept_here(&self, observation: &Observation<'_>) -> Result<usize> {
        let layer = observation.layer;
        let schedule = self.schedule(observation.prompt_tokens, layer.count)?;
        Ok(schedule[layer.index].min(observation.tokens()))
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let policy: Self = config.take_all(NAME)?;
        policy.validate()?;
        Ok(Arc::new(policy))
    }
}

/// `gamma + (1 - gamma) (1 + cos(pi l / N)) / 2`
fn cosine(gamma: f64, layer: LayerContext) -> f64 {
    let angle = std::f64::consts::PI * layer.index as f64 / layer.count as f64;
    gamma + (1.0 - gamma) * (1.0 + angle.cos()) / 2.0
}

impl Policy for PyramidInfer {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        config_of(self.name(), self)
    }

    fn budget(&self) -> Option<Budget> {
        self.budget
    }

    fn needs(&self) -> Needs {
        Needs { window: usize::MAX, ..Needs::default() }
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let [_, kv_heads, _, _] = observation.dims();
        let best = self.best(observation, self.kept_here(observation)?)?;
        let kept = best.into_iter().flat_map(|kept| std::iter::repeat_n(kept, kv_heads));
        Ok(Selection::new(kept.collect())?.into())
    }

    fn prune(&self, observation: &Observation<'_>) -> Result<Option<Vec<Vec<u32>>>> {
        let layer = observation.layer;
        let schedule = self.schedule(observation.prompt_tokens, layer.count)?;
        // With a budget, deeper layers see what this one keeps; in the paper's schedule they are
        // cut to their own number now.
        let next = if self.budget.is_some() { layer.index } else { layer.index + 1 };
        match schedule.get(next) {
            Some(&kept) if kept < observation.tokens() && layer.index + 1 < layer.count => {
                Ok(Some(self.best(observation, kept)?))
            }
            _ => Ok(None),
        }
    }

    fn restore(&self, cache: &mut LayerCache) -> Result<()> {
        cache.states_to_ints(&[generated::BLOCKS]);
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            changes_prefill: true,
            changes_decode: self.decode,
            compares_heads: true,
            ..Capabilities::default()
        }
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        _selection: &Selection,
    ) -> Result<()> {
        if !self.decode {
            return Ok(());
        }
        self.init_blocks(cache, self.prompt_sizes(observation)?)
    }

    fn room(&self, observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        if !self.decode {
            return Ok(Room::Extra(new_tokens));
        }
        let sizes = self.prompt_sizes(observation)?;
        let most = self.most_slots(observation.layer, sizes, new_tokens);
        Ok(Room::Extra(most))
    }

    fn plan(&self, layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        if !self.decode {
            return Ok(StepPlan::append());
        }
        Ok(StepPlan {
            attention: StepAttention::Live { probabilities: true, logits: false },
            update: Some(StepUpdate::Own(Box::new(move |cache, step, output| {
                if let Some(probabilities) = &output.attention.probabilities {
                    self.record(cache, probabilities, &step.position)?;
                    self.shrink(layer, cache)?;
                }
                Ok(())
            }))),
            // Only steps that shrink a block read scores.
            recordable: !generated::is_due(cache, 1),
            ..StepPlan::append()
        })
    }
}
