//! The option `rerotate`: positions without gaps. [`Rerotated`] is around a policy of the family,
//! and renumbers what that policy keeps.

use std::sync::Arc;

use kv_core::{Budget, LayerCache, Room, Selection};

use crate::{Capabilities, LayerContext, Needs, Observation, Plan, Policy, Result, StepPlan};

/// A policy whose kept tokens are renumbered without gaps, their keys re-rotated: the option
/// `"rerotate": true` of any policy of the family. It is how StreamingLLM's authors cache (rotation
/// by slot, so that distances never exceed the budget) and kvpress's key re-rotation.
///
/// Gaps close after prefill and after every step. The next token's position is the longest head's
/// number of tokens. Positions are read to the host.
#[derive(Debug, Clone)]
pub struct Rerotated(Arc<dyn Policy>);

impl Rerotated {
    /// Renumbers what `inner` keeps.
    pub fn new(inner: Arc<dyn Policy>) -> Self {
        Self(inner)
    }
}

impl Policy for Rerotated {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn config(&self) -> serde_json::Value {
        let mut config = self.0.config();
        config["rerotate"] = true.into();
        config
    }

    fn budget(&self) -> Option<Budget> {
        self.0.budget()
    }

    fn needs(&self) -> Needs {
        self.0.needs()
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        self.0.select(observation)
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        self.0.init_cache(cache, observation, selection)?;
        Ok(cache.rerotate(observation.inverse_frequencies)?)
    }

    fn room(&self, observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        self.0.room(observation, new_tokens)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { renumbers: true, ..self.0.capabilities() }
    }

    fn plan(&self, layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        let plan = self.0.plan(layer, cache)?;
        let renumbers = self.0.capabilities().changes_decode;
        let recordable = plan.recordable && !renumbers;
        Ok(StepPlan { renumbers, ..plan }.recordable(recordable))
    }
}
