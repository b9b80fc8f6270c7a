//! The top-k oracle, a yardstick: decode steps attend to the tokens of the most attention. Its
//! steps are CIS's retrievals ([`super::cis`]), one in every step.

use std::sync::Arc;

use kv_core::{Budget, LayerCache, Selection};
use kv_kernels::{ScoreReduction, Share};
use serde::{Deserialize, Serialize};

use crate::policy::config::{Config, config_of};
use crate::{
    Capabilities, Cis, CisOptions, LayerContext, Needs, Observation, Plan, Policy, Reduction,
    Result, SetsOf, Step, StepPlan,
};

const NAME: &str = "top-k-oracle";

/// The top-k oracle: the whole cache stays, but every decode step attends only to sinks, recents
/// and the tokens between them that have the most attention. It shows what a perfect choice of that
/// size would keep; it reads all keys to choose.
///
/// Sinks and recents are as in CIS ([`CisOptions`]). At equal numbers of tokens and heads, the
/// oracle is the upper bound of CIS.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopKOracle {
    /// Tokens attended to per key-value head.
    pub budget: Budget,
    /// First tokens, always attended to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sinks: Option<usize>,
    /// Last tokens, always attended to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recents: Option<usize>,
    /// Which heads choose.
    pub sets: SetsOf,
    /// How a group's query heads become one score.
    pub reduction: Reduction,
}

impl TopKOracle {
    /// Sets of key-value heads, by the mean of their query heads' attention.
    pub fn new(budget: Budget) -> Self {
        let (sets, reduction) = Default::default();
        Self { budget, sinks: None, recents: None, sets, reduction }
    }

    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`], [`crate::PolicyError::ProtectedOverBudget`].
    pub fn validate(&self) -> Result<()> {
        self.alone().map(drop)
    }

    /// CIS that shares nothing and brings no neighbours along.
    fn alone(&self) -> Result<Cis> {
        let group_score = match self.reduction {
            Reduction::Mean | Reduction::Sum => ScoreReduction::Sum,
            Reduction::Max => ScoreReduction::Max,
        };
        let Self { budget, sinks, recents, sets, .. } = *self;
        let options = CisOptions { sinks, recents, sets, group_score, ..CisOptions::new(budget) };
        Cis::named(NAME, CisOptions { block: 1, dilated: 0.0, radius: 0, ..options }, false)
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let policy = config.take_budgeted(NAME, Self::new)?;
        policy.validate()?;
        Ok(Arc::new(policy))
    }
}

impl Policy for TopKOracle {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        config_of(self.name(), self)
    }

    fn budget(&self) -> Option<Budget> {
        Some(self.budget)
    }

    /// Steps read a part of the prompt; all of it is kept.
    fn least_kept(&self, tokens: usize) -> usize {
        tokens
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        self.alone()?.select(observation)
    }

    /// As CIS, which needs a query.
    fn needs(&self) -> Needs {
        Needs { window: 1, ..Needs::default() }
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        self.alone()?.init_cache(cache, observation, selection)
    }

    fn restore(&self, cache: &mut LayerCache) -> Result<()> {
        self.alone()?.restore(cache)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { changes_decode: true, ..Capabilities::default() }
    }

    fn plan(&self, _layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        let alone = self.alone()?;
        let recordable = alone.is_steady(cache);
        let attend = move |cache: &mut LayerCache, query, step: &Step| {
            alone.attend_within(Share::default(), cache, query, step)
        };
        Ok(StepPlan::attend_with(attend).recordable(recordable))
    }
}
