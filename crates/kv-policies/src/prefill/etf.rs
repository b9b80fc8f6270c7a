//! ETF (PrHS, section IV-C): deep layers leave a prompt's early tokens as they are.
//! [`Policy::frozen_tokens`] names these tokens, and the model's prefill skips them.

use std::sync::Arc;

use kv_kernels::Share;
use serde::{Deserialize, Serialize};

use crate::policy::config::{Config, config_of};
use crate::prefill::depth_schedule::{check_schedule, idle, start_layer};
use crate::{Capabilities, FrozenTokens, LayerContext, Policy, Result, Reuse};

const NAME: &str = "etf";

/// ETF: the early token freezing of PrHS, section IV-C. In layer `l` of `N`, counted from 1, the
/// frozen tokens of a prompt of `T` tokens are the tokens behind the first `sinks` up to number
///
/// ```text
/// E_l = floor((1 - psi^(gamma (l - start) / (N - start))) T) for l >= start, else 0    (eq. 16)
/// ```
///
/// The layer passes their hidden states on as they are: neither their attention nor their MLP is
/// computed. All other tokens attend to everything, and nothing changes while decoding.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Etf {
    /// The deepest layer, `l = N`, still computes `psi^gamma` of the tokens; above 0, at most 1.
    pub psi: f64,
    /// How fast the frozen part grows with depth.
    pub gamma: f64,
    /// The layer behind which tokens freeze, `ℓ_s` of the paper, counted from 1; 0 begins with the
    /// first layer. `None` for three quarters of the layers, rounded down.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<usize>,
    /// First tokens that are always computed.
    pub sinks: usize,
    /// Where frozen tokens' keys and values come from: their hidden states (section IV-C), or the
    /// layer below (appendix D).
    pub reuse: Reuse,
}

impl Default for Etf {
    /// The parameters of the paper.
    fn default() -> Self {
        Self { psi: 0.5, gamma: 1.0, start: None, sinks: 16, reuse: Reuse::Hidden }
    }
}

impl Etf {
    /// Checks the parameters; errors name `policy`.
    ///
    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`] for a `psi` that is not above 0 and at most 1, and for
    /// a `gamma` that is negative or not finite.
    pub fn validate(&self, policy: &str) -> Result<()> {
        check_schedule(policy, [("psi", self.psi), ("gamma", self.gamma)])
    }

    /// The share of a prompt at the end of which a layer's frozen tokens end.
    pub fn share(&self, layer: LayerContext) -> Share {
        let start = start_layer(self.start, layer.count);
        Share::of_depth([self.psi, self.gamma], layer.index, start, layer.count)
    }

    /// The tokens that a layer freezes of a prompt of `tokens` tokens; `None` if there are none.
    pub fn frozen(&self, layer: LayerContext, tokens: usize) -> Option<FrozenTokens> {
        // The first layer has no keys below it to copy.
        if self.reuse == Reuse::KeysValues && layer.index == 0 {
            return None;
        }
        let end = self.share(layer).of(tokens);
        (end > self.sinks).then_some(FrozenTokens { tokens: self.sinks..end, reuse: self.reuse })
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let policy: Self = config.take_without_budget(NAME)?;
        policy.validate(NAME)?;
        Ok(Arc::new(policy))
    }
}

impl Policy for Etf {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        config_of(NAME, self)
    }

    fn warnings(&self, layers: usize) -> Vec<String> {
        idle("etf's frozen tokens", self.start, layers)
    }

    fn least_kept(&self, tokens: usize) -> usize {
        tokens
    }

    fn frozen_tokens(&self, layer: LayerContext, tokens: usize) -> Option<FrozenTokens> {
        self.frozen(layer, tokens)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { changes_prefill: true, reads_other_layers: true, ..Capabilities::default() }
    }
}
