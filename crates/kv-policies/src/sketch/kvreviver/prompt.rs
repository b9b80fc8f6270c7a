//! The scores of a prompt's tokens, and the tokens that are kept as they are.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use kv_core::{Budget, Selection};
use serde_json::Value;

use super::NAME;
use crate::policy::config::{Config, invalid};
use crate::policy::ends::protected;
use crate::{Composition, EvictionPolicy, Needs, Observation, PolicyError, Reduction, Result};

/// The option that configures the policy which scores prompts.
const CANDIDATES: &str = "candidates";
/// Options that `candidates` may not have: how much is kept, where and when. `candidates` only
/// scores prompts.
const FOREIGN: [&str; 4] = ["budget", "layers", "decode", "interval"];

/// The policy that scores prompts in place of accumulated attention, if any.
#[derive(Debug, Clone)]
pub(super) struct PromptScorer(Option<Arc<dyn EvictionPolicy>>);

impl PromptScorer {
    /// # Errors
    /// [`PolicyError::InvalidConfig`] for a policy whose heads choose together.
    pub(super) fn new(candidates: Option<Arc<dyn EvictionPolicy>>) -> Result<Self> {
        match candidates.as_ref().filter(|own| !own.heads_choose()) {
            Some(together) => Err(joint(together.name())),
            None => Ok(Self(candidates)),
        }
    }

    /// Writes the policy's configuration, without the options that it may not have, into the
    /// configuration that it is a part of; `null` for accumulated attention.
    pub(super) fn write_into(&self, config: &mut Value) {
        let Some(candidates) = &self.0 else {
            config[CANDIDATES] = Value::Null;
            return;
        };
        let mut inner = candidates.config();
        if let Some(inner) = inner.as_object_mut() {
            FOREIGN.iter().for_each(|key| drop(inner.remove(*key)));
        }
        config[CANDIDATES] = inner;
    }

    pub(super) fn composition(&self) -> Composition<'_> {
        match &self.0 {
            Some(candidates) => Composition::Around { option: CANDIDATES, inner: &**candidates },
            None => Composition::None,
        }
    }

    pub(super) fn needs(&self) -> Needs {
        match &self.0 {
            Some(candidates) => candidates.needs(),
            None => Needs { column_sums: true, ..Needs::default() },
        }
    }

    /// The accumulated attention of a prompt's tokens, or their scores by another policy in its
    /// place, `[B, Hkv, T]`, where `exact` tokens are kept as they are.
    pub(super) fn scores(&self, observation: &Observation<'_>, exact: usize) -> Result<Tensor<3>> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        let missing = |what| PolicyError::MissingObservation { policy: NAME, what };
        let Some(candidates) = &self.0 else {
            let sums = observation.column_sums.clone();
            let sums = sums.ok_or_else(|| missing("column sums of attention"))?;
            return Ok(Reduction::Sum.groups(sums, kv_heads));
        };
        // Short prompts are kept whole, but their tokens need scores, too.
        let budget = exact.min(tokens.saturating_sub(1)).max(1);
        let scores = match candidates.with_budget(Budget::Tokens(budget)) {
            Ok(candidates) => candidates.rank(observation)?.map(|(scores, _)| scores),
            // More tokens are protected than the prompt has.
            Err(PolicyError::ProtectedOverBudget { .. }) if tokens <= exact => None,
            Err(error) => return Err(error),
        };
        let Some(scores) = scores else {
            if tokens > exact {
                return Err(joint(candidates.name()));
            }
            let device = observation.keys.device();
            return Ok(Tensor::zeros([batch, kv_heads, tokens], (&device, DType::F32)));
        };
        // Protected tokens have +∞, and get the highest score of the others.
        let endless = scores.clone().is_inf().bool_and(scores.clone().greater_scalar(0.0));
        let highest = scores.clone().mask_fill(endless.clone(), f32::MIN).max_dim(2);
        let scores = scores.mask_where(endless, highest.expand([batch, kv_heads, tokens]));
        let lowest = scores.clone().min_dim(2);
        let scores = scores - lowest;
        let total = scores.clone().sum_dim(2).clamp_min(f32::MIN_POSITIVE);
        let mass = (group(observation) * tokens) as f64;
        Ok(scores.mul_scalar(mass) / total)
    }
}

fn joint(name: &str) -> PolicyError {
    let reason = format!("`candidates` is `{name}`, whose heads do not choose for themselves");
    PolicyError::InvalidConfig { policy: NAME.into(), reason }
}

/// The tokens of a prompt that are kept exactly: all of a prompt of up to `budget` tokens; else
/// `exact` of them, the most recent ones and the other tokens of the highest scores.
pub(super) fn exact_tokens(
    observation: &Observation<'_>,
    budget: usize,
    [exact, recents]: [usize; 2],
    scores: Tensor<3>,
) -> Result<Selection> {
    let [batch, kv_heads, tokens, _] = observation.dims();
    if budget >= tokens {
        return Ok(Selection::all(batch * kv_heads, tokens));
    }
    Ok(Selection::highest(protected(scores, 0, recents), exact)?)
}

/// Query heads to a key-value head, as far as an observation shows.
pub(super) fn group(observation: &Observation<'_>) -> usize {
    let kv_heads = observation.dims()[1];
    let heads = [
        observation.column_sums.as_ref().map(|sums| sums.dims()[1]),
        observation.window.as_ref().map(|window| window.dims()[1]),
        observation.raw_queries.as_ref().map(|queries| queries.dims()[1]),
    ];
    heads.into_iter().flatten().next().map_or(1, |heads| heads / kv_heads)
}

/// The policy that scores prompts, by name or configuration without a budget; `null` is accumulated
/// attention, and so is a missing one without a `default`.
pub(super) fn candidates(
    config: &mut Config,
    default: Option<&str>,
) -> Result<Option<Arc<dyn EvictionPolicy>>> {
    let Some(mut candidates) = config.take_part(CANDIDATES, default) else { return Ok(None) };
    if candidates.is_null() {
        return Ok(None);
    }
    if let Some(candidates) = candidates.as_object_mut() {
        if let Some(key) = FOREIGN.iter().find(|key| candidates.contains_key(**key)) {
            let reason = format!(
                "`{key}` in `candidates`, expected it beside, if at all: they score prompts alone"
            );
            return Err(invalid(NAME, reason));
        }
        candidates.insert("budget".into(), serde_json::json!(1.0));
    }
    let policy = config.build(&candidates)?;
    let name = policy.name();
    let reason = |expected| format!("`candidates` is `{name}`, expected {expected}");
    let evictor =
        policy.into_eviction_policy().map_err(|expected| invalid(NAME, reason(expected)))?;
    Ok(Some(evictor))
}
