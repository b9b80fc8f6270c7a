//! Double Sparsity (<https://arxiv.org/abs/2408.07092>): decode steps score all tokens by a few
//! channels, and attend to the best tokens. `choose` is the step's choice; [`super::channels`] has
//! the channels.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use kv_core::{Budget, LayerCache, Selection};
use kv_kernels::{Choice, label_scores, top_slots};
use serde::{Deserialize, Serialize};

use crate::policy::check::Check;
use crate::policy::config::{Config, config_of};
use crate::policy::lists::SlotList;
use crate::policy::state_tensors::int_state;
use crate::reading::channels::{CHANNELS, Channels, ChannelsOf, channels};
use crate::reading::subset::{BUDGETS, set_budgets};
use crate::{Capabilities, LayerContext, Needs, Observation, Policy, Result, StepPlan};

const NAME: &str = "double-sparsity";

/// Double Sparsity (Yang et al., 2024, section 3): the whole cache stays; a decode step scores
/// every token by the few channels of each query head that matter most, and attends to the best
/// ones exactly. The first layers attend to everything, and so do all layers while a prompt is
/// read.
///
/// Channels are calibrated offline ([`Channels`]). Without a calibration the prompt's own last
/// tokens choose them, which is ours.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DoubleSparsity {
    /// Tokens attended to per query head.
    pub budget: Budget,
    /// Channels of a query head; a sixteenth of the head dim by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<usize>,
    /// Calibrated channels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channels: Option<Channels>,
    /// The prompt's last tokens that choose channels, where none are calibrated.
    pub window: usize,
    /// First layers that attend to everything.
    pub dense_layers: usize,
}

impl DoubleSparsity {
    /// The defaults, without calibrated channels.
    pub fn new(budget: Budget) -> Self {
        // The window is ours; dense layers are as under Quest.
        Self { budget, labels: None, channels: None, window: 64, dense_layers: 2 }
    }

    /// The policy with its channels read from their file.
    ///
    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`].
    pub fn validated(self) -> Result<Self> {
        self.budget.validate()?;
        let check = Check(NAME);
        check.positive("labels", self.labels.unwrap_or(1))?;
        check.positive("window", self.window)?;
        let channels = self.channels.map(|channels| channels.read(NAME)).transpose()?;
        Ok(Self { channels, ..self })
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let policy = config.take_budgeted(NAME, Self::new)?;
        Ok(Arc::new(policy.validated()?))
    }
}

impl Policy for DoubleSparsity {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        config_of(NAME, self)
    }

    fn budget(&self) -> Option<Budget> {
        Some(self.budget)
    }

    /// Steps read a part of the prompt; all of it is kept.
    fn least_kept(&self, tokens: usize) -> usize {
        tokens
    }

    fn needs(&self) -> Needs {
        Needs { window: self.window, ..Needs::default() }
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        _selection: &Selection,
    ) -> Result<()> {
        if observation.layer.index < self.dense_layers {
            return Ok(());
        }
        let labels = self.labels.unwrap_or((cache.head_dim() / 16).max(1));
        let (own, of) = (self.channels.as_ref(), ChannelsOf::QueryHeads);
        let channels = channels(NAME, own, observation, of, labels, self.window)?;
        set_budgets(cache, channels.dims()[1], [self.budget.behind(observation.tokens()), 0, 0]);
        cache.set_int_state(CHANNELS, channels);
        Ok(())
    }

    fn restore(&self, cache: &mut LayerCache) -> Result<()> {
        cache.states_to_ints(&[BUDGETS, CHANNELS]);
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { changes_decode: true, ..Capabilities::default() }
    }

    fn plan(&self, layer: LayerContext, _cache: &LayerCache) -> Result<StepPlan<'_>> {
        if layer.index < self.dense_layers {
            return Ok(StepPlan::append());
        }
        Ok(StepPlan::attend_with(|cache, query, _| {
            let [channels, budgets] =
                [int_state(NAME, cache, CHANNELS)?, int_state(NAME, cache, BUDGETS)?];
            let most = self.budget.resolve(cache.layout().most_capacity());
            let list = choose(cache, query.clone(), [&channels, &budgets], most)?;
            Ok(list.attend(cache, query)?.output)
        }))
    }
}

/// At most `tokens` slots, of the highest products of queries and keys over a few channels
/// ([`label_scores`]).
///
/// # Shapes
/// `query` `[B, Hq, D]`; integers `channels` `[B, Hq, r]` and `budgets` `[B, Hq, 3]`, without
/// sinks and recents.
///
/// # Errors
/// [`crate::PolicyError::Kernel`].
fn choose(
    cache: &LayerCache,
    query: Tensor<3>,
    [channels, budgets]: [&Tensor<3, Int>; 2],
    tokens: usize,
) -> Result<SlotList> {
    let ([batch, heads, _], longest) = (query.dims(), cache.layout().most_capacity());
    let ranges = cache.ranges();
    let scored = label_scores(query, cache.keys(), channels, budgets, ranges, longest, None)?;
    let most = tokens.clamp(1, longest);
    let choice = Choice::Top(scored.wanted);
    let chosen = top_slots(scored.scores, Some(scored.candidates), choice, most)?;
    let kv_heads = cache.layout().kv_heads();
    let indices = chosen.indices.reshape([batch, kv_heads, heads / kv_heads * most]);
    let slots = indices + cache.ranges().offsets.clone().unsqueeze_dim::<3>(2);
    Ok(SlotList { slots: slots.reshape([batch * heads, most]), counts: chosen.counts })
}
