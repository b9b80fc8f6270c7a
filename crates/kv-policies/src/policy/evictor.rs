//! Policies whose evictions another policy carries out in its own way.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use kv_core::{Budget, LayerCache};

use super::config::Config;
use crate::{LayerContext, Observation, Policy, PolicyError, Result, Step};

/// A policy that says what is to go, so that another may do something else with it than drop it.
pub trait EvictionPolicy: Policy {
    /// Scores of a prompt's tokens, `[B, Hkv, T]`, f32, +∞ for those that always stay, and how many
    /// tokens a head keeps; `None` where all stay, or heads do not choose for themselves.
    ///
    /// # Errors
    /// As [`Policy::select`].
    fn rank(&self, observation: &Observation<'_>) -> Result<Option<(Tensor<3>, usize)>>;

    /// Whether heads choose for themselves, so that [`Self::rank`] has their scores.
    fn heads_choose(&self) -> bool {
        true
    }

    /// First and last tokens that a head of so many `slots` always keeps: of a prompt, or while
    /// decoding.
    ///
    /// # Errors
    /// [`PolicyError::ProtectedOverBudget`].
    fn protected(&self, slots: usize, decoding: bool) -> Result<[usize; 2]>;

    /// Slots per head and layer.
    fn budget(&self) -> Budget;

    /// This policy with another budget, equal for all layers.
    ///
    /// # Errors
    /// [`PolicyError`] where the budget does not hold what the policy protects.
    fn with_budget(&self, budget: Budget) -> Result<Arc<dyn EvictionPolicy>>;

    /// A decode step without its eviction: appends, attends, and says what is due.
    ///
    /// # Errors
    /// As [`Policy::step`].
    fn attend(&self, layer: LayerContext, cache: &mut LayerCache, step: &Step) -> Result<Attended>;
}

/// The policy whose evictions another one carries out: the part `evictor` of its configuration,
/// `default` where there is none, with its budget.
pub(crate) fn evictor_part(config: &mut Config, default: &str) -> Result<Arc<dyn Policy>> {
    let mut evictor = config.take_part("evictor", Some(default)).unwrap_or_default();
    if let (Some(budget), Some(evictor)) = (config.take("budget"), evictor.as_object_mut()) {
        evictor.insert("budget".into(), budget);
    }
    config.build(&evictor)
}

/// The evictor of the policy `around` it.
///
/// # Errors
/// [`PolicyError::InvalidConfig`] for policies that do not evict by scores.
pub(crate) fn evictor_of(policy: Arc<dyn Policy>, around: &str) -> Result<Arc<dyn EvictionPolicy>> {
    let name = policy.name();
    policy.into_eviction_policy().ok_or_else(|| PolicyError::InvalidConfig {
        policy: around.into(),
        reason: format!("`evictor` is `{name}`, expected a policy that evicts by scores"),
    })
}

/// A decode step before its eviction.
#[derive(Debug)]
pub struct Attended {
    /// `[B, Hq, D]`
    pub output: Tensor<3>,
    /// The new tokens' queries after RoPE, `[B, Hq, D]`.
    pub query: Tensor<3>,
    /// Every slot's logit with its log-weight, `[S, G]`, f32.
    pub logits: Tensor<2>,
    /// `[B, Hq]`, f32.
    pub log_sum_exp: Tensor<2>,
    /// What is to go; `None` while all heads are within their limits.
    pub due: Option<Eviction>,
}

/// What is to go.
#[allow(clippy::large_enum_variant, reason = "a few handles to tensors, one a step")]
#[derive(Debug)]
pub enum Eviction {
    /// One slot of each head over its limit.
    One {
        /// `[B, Hkv]`
        victims: Tensor<2, Int>,
        /// `[B * Hkv]`
        limits: Vec<usize>,
    },
    /// All slots but those of the highest scores.
    KeepTop {
        /// `[S]`, f32.
        scores: Tensor<1>,
        /// How many stay of each head, `[B * Hkv]`.
        counts: Vec<usize>,
    },
}

impl Eviction {
    /// Drops what is to go.
    pub(crate) fn apply_to(self, cache: &mut LayerCache) -> Result<()> {
        match self {
            Self::One { victims, limits } => cache.evict_slots(victims, &limits)?,
            Self::KeepTop { scores, counts } => {
                let kept = cache.highest(scores, &counts)?;
                cache.retain(&kept)?;
            }
        }
        Ok(())
    }
}
