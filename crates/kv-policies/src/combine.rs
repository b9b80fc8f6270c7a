//! One policy for prompts and another one for decode steps, as one policy: [`Combine::new`] says
//! which pairs fit together.

use std::sync::Arc;

use burn::tensor::Tensor;
use kv_core::{Budget, LayerCache, Room, Selection};

use crate::policy::config::{Config, invalid};
use crate::{
    Capabilities, Composition, FrozenTokens, LayerContext, Needs, Observation, Plan, Policy,
    PolicyError, Result, Step, StepPlan, VisibleWindow,
};

/// The registry's name.
pub(crate) const COMBINE: &str = "combine";

/// One policy for the prompt and another for decoding: `{"policy": "combine", "prefill": {...},
/// "decode": {...}}`, such as SnapKV's choice kept within its budget by H2O.
#[derive(Debug, Clone)]
pub struct Combine {
    prefill: Arc<dyn Policy>,
    decode: Arc<dyn Policy>,
}

impl Combine {
    /// `prefill` chooses from the prompt, `decode` does the rest, merging and renumbering included.
    ///
    /// # Errors
    /// [`PolicyError::InvalidConfig`] where only `prefill` renumbers: decode steps would not go on
    /// with it; and for policies that cannot be halved ([`Capabilities::combines`]).
    pub fn new(prefill: Arc<dyn Policy>, decode: Arc<dyn Policy>) -> Result<Self> {
        for (part, policy) in [("prefill", &prefill), ("decode", &decode)] {
            if !policy.capabilities().combines {
                let reason = format!(
                    "`{part}` is `{}`, whose prompt and decode steps belong together",
                    policy.name()
                );
                return Err(PolicyError::InvalidConfig { policy: COMBINE.into(), reason });
            }
        }
        if prefill.capabilities().renumbers && !decode.capabilities().renumbers {
            let reason = "`rerotate` of `prefill` alone does not hold while decoding, expected it \
                          in `decode`";
            return Err(PolicyError::InvalidConfig {
                policy: COMBINE.into(),
                reason: reason.into(),
            });
        }
        Ok(Self { prefill, decode })
    }

    /// The policy from the configurations of its parts.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let mut part = |name: &str| match config.take(name) {
            Some(part) => config.build(&part),
            None => Err(invalid(COMBINE, format!("`{name}` is missing"))),
        };
        Ok(Arc::new(Self::new(part("prefill")?, part("decode")?)?))
    }
}

impl Policy for Combine {
    fn name(&self) -> &'static str {
        COMBINE
    }

    fn config(&self) -> serde_json::Value {
        serde_json::json!({
            "policy": COMBINE,
            "prefill": self.prefill.config(),
            "decode": self.decode.config(),
        })
    }

    fn warnings(&self, layers: usize) -> Vec<String> {
        [self.prefill.warnings(layers), self.decode.warnings(layers)].concat()
    }

    fn composition(&self) -> Composition<'_> {
        Composition::Combined { prefill: &*self.prefill, decode: &*self.decode }
    }

    fn budget(&self) -> Option<Budget> {
        self.decode.budget()
    }

    fn needs(&self) -> Needs {
        self.prefill.needs().union(self.decode.needs())
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        self.prefill.select(observation)
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        self.decode.init_cache(cache, observation, selection)
    }

    fn room(&self, observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        self.decode.room(observation, new_tokens)
    }

    fn restore(&self, cache: &mut LayerCache) -> Result<()> {
        self.decode.restore(cache)
    }

    fn capabilities(&self) -> Capabilities {
        let (prefill, decode) = (self.prefill.capabilities(), self.decode.capabilities());
        Capabilities {
            changes_prefill: prefill.changes_prefill,
            changes_decode: decode.changes_decode,
            reads_other_layers: prefill.reads_other_layers || decode.reads_other_layers,
            compares_hidden: decode.compares_hidden,
            renumbers: decode.renumbers,
            target: decode.target,
            block_of_sums: decode.block_of_sums,
            ..Capabilities::default()
        }
    }

    fn plan(&self, layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        self.decode.plan(layer, cache)
    }

    fn step(&self, layer: LayerContext, cache: &mut LayerCache, step: Step) -> Result<Tensor<3>> {
        self.decode.step(layer, cache, step)
    }

    fn last_attended(
        &self,
        layer: LayerContext,
        cache: &LayerCache,
    ) -> Result<Option<Vec<Vec<usize>>>> {
        self.decode.last_attended(layer, cache)
    }

    fn prune(&self, observation: &Observation<'_>) -> Result<Option<Vec<Vec<u32>>>> {
        self.prefill.prune(observation)
    }

    fn visible_window(&self, layer: LayerContext) -> Option<VisibleWindow> {
        self.prefill.visible_window(layer)
    }

    fn frozen_tokens(&self, layer: LayerContext, tokens: usize) -> Option<FrozenTokens> {
        self.prefill.frozen_tokens(layer, tokens)
    }
}
