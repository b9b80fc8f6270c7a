//! The option `rerotate`: positions without gaps. [`Rerotated`] is around a policy of the family,
//! and renumbers what that policy keeps.

use std::sync::Arc;

use kv_core::{LayerCache, Selection};

use crate::policy::forward::forward;
use crate::{Capabilities, LayerContext, Observation, Policy, Result, StepPlan};

/// A policy whose kept tokens are renumbered without gaps, their keys re-rotated: the option
/// `"rerotate": true` of any policy of the family. It is how StreamingLLM's authors cache (rotation
/// by slot, so that distances never exceed the budget) and kvpress's key re-rotation.
///
/// Gaps close after prefill and after every step. The next token's position is the longest head's
/// number of tokens. Positions are read to the host.
#[derive(Debug, Clone)]
pub struct Rerotated {
    inner: Arc<dyn Policy>,
}

impl Rerotated {
    /// Renumbers what `inner` keeps.
    pub fn new(inner: Arc<dyn Policy>) -> Self {
        Self { inner }
    }
}

impl Policy for Rerotated {
    forward!(inner: name, budget, needs, select, room);

    fn config(&self) -> serde_json::Value {
        let mut config = self.inner.config();
        config["rerotate"] = true.into();
        config
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        self.inner.init_cache(cache, observation, selection)?;
        Ok(cache.rerotate(observation.inverse_frequencies)?)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { renumbers: true, ..self.inner.capabilities() }
    }

    fn plan(&self, layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        let plan = self.inner.plan(layer, cache)?;
        let renumbers = self.inner.capabilities().changes_decode;
        let recordable = plan.recordable && !renumbers;
        Ok(StepPlan { renumbers, ..plan }.recordable(recordable))
    }
}
