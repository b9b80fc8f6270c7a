//! PrHS's progressive sliding attention window. The submodule frees slots.

mod free;

use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use kv_core::{LayerCache, Room, Selection};
use kv_kernels::{DecodeAttentionOptions, Share, SlotView};
use serde::{Deserialize, Serialize};

use crate::policy::config::{Config, config_of};
use crate::prefill::depth_schedule::{check_schedule, idle, start_layer};
use crate::{
    Capabilities, LayerContext, Observation, Plan, Policy, Result, Step, StepPlan, VisibleWindow,
};

const NAME: &str = "psaw";

/// PSAW: the progressive sliding attention window of PrHS, section IV-B. With tokens and layers
/// counted from 1, the query of token `t` in layer `l` of `N` sees the first `sinks` tokens and all
/// tokens from `P_l(t)` on,
///
/// ```text
/// P_l(t) = floor((1 - phi^(alpha (l - start) / (N - start))) t) for l >= start, else 0    (eq. 15)
/// ```
///
/// in prefill and in decode. Everything stays in the cache, unless `free` is set. Slots that no
/// later query of a layer can see are then freed: after the prompt and, many at a time, while
/// decoding.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Psaw {
    /// The deepest layer, `l = N`, sees `phi^alpha` of the tokens; above 0, at most 1.
    pub phi: f64,
    /// How fast windows shrink with depth.
    pub alpha: f64,
    /// The layer behind which windows shrink, `ℓ_s` of the paper, counted from 1; 0 begins with the
    /// first layer. `None` for three quarters of the layers, rounded down.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<usize>,
    /// First tokens that every query sees; slots, where another policy chose from the prompt.
    pub sinks: usize,
    /// Whether slots that can never be seen again are freed.
    pub free: bool,
}

impl Default for Psaw {
    /// The parameters of the paper.
    fn default() -> Self {
        Self { phi: 0.7, alpha: 1.0, start: None, sinks: 16, free: false }
    }
}

impl Psaw {
    /// Checks the parameters; errors name `policy`.
    ///
    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`] for a `phi` that is not above 0 and at most 1, and for
    /// an `alpha` that is negative or not finite.
    pub fn validate(&self, policy: &str) -> Result<()> {
        check_schedule(policy, [("phi", self.phi), ("alpha", self.alpha)])
    }

    /// The share of the tokens so far that a layer's window leaves out.
    pub fn share(&self, layer: LayerContext) -> Share {
        let start = start_layer(self.start, layer.count);
        Share::of_depth([self.phi, self.alpha], layer.index, start, layer.count)
    }

    /// A layer's window in prefill; `None` where it sees everything.
    pub fn window(&self, layer: LayerContext) -> Option<VisibleWindow> {
        let from = self.share(layer);
        (!from.is_zero()).then_some(VisibleWindow { from, sinks: self.sinks })
    }

    /// A layer's window in a decode step whose token is appended; `newest` has the tokens'
    /// positions, `[B]`. The device computes it.
    ///
    /// # Errors
    /// The errors of [`LayerCache::window_starts`].
    pub fn view(
        &self,
        layer: LayerContext,
        cache: &LayerCache,
        newest: &Tensor<1, Int>,
    ) -> Result<SlotView> {
        Ok(match self.window(layer) {
            Some(VisibleWindow { from, sinks }) => {
                SlotView::Window { sinks, starts: cache.window_starts(newest, from)? }
            }
            None => SlotView::All,
        })
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let policy: Self = config.take_without_budget(NAME)?;
        policy.validate(NAME)?;
        Ok(Arc::new(policy))
    }
}

impl Policy for Psaw {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        config_of(NAME, self)
    }

    fn warnings(&self, layers: usize) -> Vec<String> {
        idle("psaw's windows", self.start, layers)
    }

    /// How many slots are freed depends on the number of layers.
    fn least_kept(&self, tokens: usize) -> usize {
        if self.free { 0 } else { tokens }
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        let kept = self.kept(observation.layer, tokens);
        Ok(Selection::new(vec![kept; batch * kv_heads])?.into())
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        _selection: &Selection,
    ) -> Result<()> {
        let newest = observation.prompt_tokens as i32 - 1;
        self.free_hidden(observation.layer, cache, &vec![newest; cache.layout().batch()])
    }

    fn room(&self, observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        Ok(self.slots(observation.layer, observation.prompt_tokens, new_tokens))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { changes_prefill: true, changes_decode: true, ..Capabilities::default() }
    }

    fn plan(&self, layer: LayerContext, _cache: &LayerCache) -> Result<StepPlan<'_>> {
        let attend = move |cache: &mut LayerCache, query, step: &Step| {
            let view = self.view(layer, cache, &step.position)?;
            let options = DecodeAttentionOptions { view, ..Default::default() };
            let output = cache.attend(query, options)?.output;
            self.free_due(layer, cache, &step.position)?;
            Ok(output)
        };
        Ok(StepPlan::attend_with(attend).recordable(!self.free))
    }

    fn last_attended(
        &self,
        layer: LayerContext,
        cache: &LayerCache,
    ) -> Result<Option<Vec<Vec<usize>>>> {
        let (share, positions) = (self.share(layer), cache.read_positions()?);
        let seen = (0..cache.layout().head_ranges()).map(|range| {
            let live = cache.layout().live(range);
            let newest = live.clone().next_back().map_or(0, |slot| positions[slot]);
            let first = share.first_seen(usize::try_from(newest).unwrap_or(0)) as i32;
            let slots = live.clone().enumerate();
            let seen = slots.filter(|(at, slot)| *at < self.sinks || positions[*slot] >= first);
            seen.map(|(at, _)| at).collect()
        });
        Ok(Some(seen.collect()))
    }

    fn visible_window(&self, layer: LayerContext) -> Option<VisibleWindow> {
        self.window(layer)
    }
}
