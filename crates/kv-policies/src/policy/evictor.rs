//! Policies whose victims another policy merges before they are dropped.

use std::sync::Arc;

use burn::tensor::Tensor;
use kv_core::Budget;

use super::config::{Config, EVICTOR, invalid};
use crate::{Observation, Policy, Result};

/// A policy that chooses victims which another policy may merge before they are dropped
/// ([`crate::Merge`]): its steps' plans append, attend to all live slots and evict.
pub trait EvictionPolicy: Policy {
    /// Scores of a prompt's tokens, `[B, Hkv, T]`, f32, +∞ for those that always stay, and how many
    /// tokens a head keeps; `None` where all stay, or heads do not choose for themselves.
    ///
    /// # Errors
    /// The errors of [`Policy::select`].
    fn rank(&self, observation: &Observation<'_>) -> Result<Option<(Tensor<3>, usize)>>;

    /// Scores of a prompt's tokens, `[B, Hkv, T]`, f32, whether they always stay or not, for heads
    /// of `slots` slots. Tokens that no query scores, such as SnapKV's window, have +∞.
    ///
    /// # Errors
    /// The errors of [`Policy::select`].
    fn scores(&self, observation: &Observation<'_>, slots: usize) -> Result<Tensor<3>>;

    /// The track of the scores that decode steps add to, if they add to any. Merges may sum it up.
    fn accumulates(&self) -> Option<&'static str> {
        None
    }

    /// Whether heads choose for themselves, so that [`Self::rank`] has their scores.
    fn heads_choose(&self) -> bool {
        true
    }

    /// The first and last tokens that a head of `slots` slots always keeps: of a prompt, or while
    /// decoding.
    ///
    /// # Errors
    /// [`crate::PolicyError::ProtectedOverBudget`].
    fn protected(&self, slots: usize, decoding: bool) -> Result<[usize; 2]>;

    /// This policy with another budget, equal for all layers.
    ///
    /// # Errors
    /// [`crate::PolicyError`] where the budget does not hold what the policy protects.
    fn with_budget(&self, budget: Budget) -> Result<Arc<dyn EvictionPolicy>>;
}

/// The policy whose victims another one merges: the part `evictor` of its configuration, `default`
/// where there is none, with its budget.
pub(crate) fn evictor_part(config: &mut Config, default: &str) -> Result<Arc<dyn Policy>> {
    let mut evictor = config.take_part(EVICTOR, Some(default)).unwrap_or_default();
    if let (Some(budget), Some(evictor)) = (config.take("budget"), evictor.as_object_mut()) {
        evictor.insert("budget".into(), budget);
    }
    config.build(&evictor)
}

/// The evictor of the policy `around` it.
///
/// # Errors
/// [`crate::PolicyError::InvalidConfig`] for policies that do not evict by scores.
pub(crate) fn evictor_of(policy: Arc<dyn Policy>, around: &str) -> Result<Arc<dyn EvictionPolicy>> {
    let name = policy.name();
    let reason = |expected| format!("`evictor` is `{name}`, expected {expected}");
    policy.into_eviction_policy().map_err(|expected| invalid(around, reason(expected)))
}
