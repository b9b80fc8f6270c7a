use burn::tensor::Tensor;
use kv_core::{Budget, LayerCache, Selection};
use serde::{Deserialize, Serialize};

use crate::channels::{CHANNELS, Channels, channels};
use crate::subset::{BUDGETS, dense, most_tokens, set_budgets, state, tokens_of};
use crate::{LayerContext, Needs, Observation, Plan, Policy, PolicyError, Result, Step};

const NAME: &str = "double-sparsity";

/// Double Sparsity (Yang et al., 2024, section 3): the whole cache stays; a decode step scores
/// every token by the few channels of each query head that matter most, and attends to the best
/// ones exactly. The first layers attend to everything, and so do all while a prompt is read.
///
/// Channels are calibrated offline ([`Channels`]). Without that they are those of the prompt's own
/// last tokens, which is ours.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DoubleSparsity {
    /// Tokens attended to per query head.
    pub budget: Budget,
    /// Channels of a query head; a sixteenth of the head dim by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<usize>,
    /// Calibrated channels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<Channels>,
    /// Without them, the prompt's last tokens that channels are chosen by.
    #[serde(default = "window")]
    pub window: usize,
    /// First layers that attend to everything.
    #[serde(default = "two")]
    pub dense_layers: usize,
}

fn window() -> usize {
    64
}

fn two() -> usize {
    2
}

impl DoubleSparsity {
    /// The policy with its channels read from their file.
    ///
    /// # Errors
    /// [`PolicyError::InvalidConfig`].
    pub fn validated(self) -> Result<Self> {
        self.budget.validate()?;
        let invalid = |name: &str| PolicyError::InvalidConfig {
            policy: NAME.into(),
            reason: format!("`{name}` is 0, expected at least 1"),
        };
        if self.labels == Some(0) {
            return Err(invalid("labels"));
        }
        if self.window == 0 {
            return Err(invalid("window"));
        }
        let channels = self.channels.map(|channels| channels.read(NAME)).transpose()?;
        Ok(Self { channels, ..self })
    }
}

impl Policy for DoubleSparsity {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        crate::registry::config_of(NAME, self)
    }

    fn needs(&self) -> Needs {
        Needs { window: self.window, ..Needs::default() }
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        Ok(Selection::all(batch * kv_heads, tokens).into())
    }

    fn prime(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        _selection: &Selection,
    ) -> Result<()> {
        if observation.layer.index < self.dense_layers {
            return Ok(());
        }
        let labels = self.labels.unwrap_or((cache.head_dim() / 16).max(1));
        let channels = channels(NAME, self.channels.as_ref(), observation, labels, self.window)?;
        set_budgets(cache, channels.dims()[1], [tokens_of(self.budget, observation), 0, 0]);
        cache.set_state(CHANNELS, channels);
        Ok(())
    }

    fn changes_decode(&self) -> bool {
        true
    }

    fn records(&self, cache: &LayerCache) -> bool {
        !cache.options().growable
    }

    fn attend_appended(
        &self,
        layer: LayerContext,
        cache: &mut LayerCache,
        query: Tensor<3>,
        _step: &Step,
    ) -> Result<Tensor<3>> {
        if layer.index < self.dense_layers {
            return dense(cache, query);
        }
        let [channels, budgets] = [state(NAME, cache, CHANNELS)?, state(NAME, cache, BUDGETS)?];
        let most = most_tokens(self.budget, cache);
        let list = cache.choose_by_channels(query.clone(), &channels, &budgets, most)?;
        Ok(cache.attend_listed(query, list)?.output)
    }
}
