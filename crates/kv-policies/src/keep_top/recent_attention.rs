//! PyramidInfer's tokens (<https://arxiv.org/abs/2405.12532>) by the attention of the last queries,
//! without pruning hidden states. [`Scorer::prefill`] scores a prompt; steps add their attention.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn::tensor::activation::softmax;
use kv_core::LayerAllocation;
use serde::{Deserialize, Serialize};

use super::build::preset;
use crate::policy::attention_scores::{LAST_WEIGHT, recent_attention, recent_exponentials};
use crate::policy::config::Config;
use crate::{Decoding, KeepTopDefaults, Needs, Observation, Policy, Reduction, Result, Scorer};

/// PyramidInfer's choice of tokens (Yang et al., 2024, section 4.2) without its pruning of hidden
/// states, by each head for itself, as in KeepKV's experiments. A token's score is the attention of
/// the prompt's last queries, weighted towards the last (1 to 1.2); decode steps add their
/// attention. 4 sinks are always kept, and recents on a fifth of the budget.
///
/// KeepKV's paper says that "the ratio between the recent window and the heavy hitter varies
/// between 5:1 and 4:1" (appendix B.3). Its authors' code has a fifth of recents and four fifths of
/// heavy hitters (`pyramidinfer_recent_ratio = 0.2`), whose share falls to 0.8 with depth: heavy
/// hitters to recents from 4:1 to 3.2:1, all tokens to recents from 5:1 to 4.2:1. The code is
/// followed here.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecentAttention {
    /// Share of the prompt whose queries count.
    pub share: f64,
    /// The number of queries that count, in place of the share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<usize>,
    /// The weight of the last query's attention; the first query's is 1.
    pub last: f32,
    /// Whether scores are sums of `exp(q . k / sqrt(D))` without the softmax's division, as in the
    /// code of KeepKV's authors. A head's scores are then scaled to sum to the number of queries.
    pub unnormalised: bool,
}

impl Default for RecentAttention {
    fn default() -> Self {
        Self { share: 0.2, rows: None, last: LAST_WEIGHT, unnormalised: false }
    }
}

impl RecentAttention {
    /// The last layer's share of the first layer's budget in the code of KeepKV's authors: recents
    /// of 0.2, and heavy hitters that fall from 0.8 to 0.64 along a half cosine.
    pub const GAMMA: f64 = 0.84;

    /// `[B, Hkv, T]`
    fn scores(&self, observation: &Observation<'_>) -> Result<Tensor<3>> {
        let share = (observation.tokens() as f64 * self.share) as usize + 1;
        let rows = self.rows.unwrap_or(share);
        let queries = observation.last_queries(Self::NAME, rows)?;
        if self.unnormalised {
            let logs = recent_exponentials(&queries, observation.keys, self.last);
            let shares = softmax(logs, 2).mul_scalar(queries.dims()[2] as f64);
            return Ok(Reduction::Mean.groups(shares, observation.dims()[1]));
        }
        let scores = recent_attention(&queries, observation.keys, self.last)?;
        // Summed, as the steps that follow add their scores up.
        let sums = scores.mul_scalar(queries.dims()[2] as f64);
        Ok(Reduction::Mean.groups(sums, observation.dims()[1]))
    }
}

/// The policy from its configuration; layers share the budget as in KeepKV's experiments.
pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
    preset::<RecentAttention>(RecentAttention::NAME, config, |options, _| {
        options.layers = LayerAllocation::Cosine { gamma: RecentAttention::GAMMA };
    })
}

impl Scorer for RecentAttention {
    const NAME: &'static str = "recent-attention";

    fn validate(&self) -> std::result::Result<(), String> {
        if !(self.share > 0.0 && self.share <= 1.0) {
            return Err(format!("`share` is {}, expected above 0, up to 1", self.share));
        }
        if self.rows == Some(0) {
            return Err("`rows` is 0, expected at least 1".into());
        }
        if !(self.last > 0.0 && self.last.is_finite()) {
            return Err(format!("`last` is {}, expected a number above 0", self.last));
        }
        Ok(())
    }

    fn needs(&self) -> Needs {
        Needs { window: usize::MAX, ..Needs::default() }
    }

    fn prefill(&self, observation: &Observation<'_>, _budget: usize) -> Result<Tensor<3>> {
        observation.once(&format!("{self:?}"), || self.scores(observation))
    }

    fn decoding(&self) -> Decoding {
        Decoding::AfterAttention { probabilities: false, accumulate: true }
    }

    fn defaults() -> KeepTopDefaults {
        KeepTopDefaults { sinks: 4, recent_share: 0.2, ..KeepTopDefaults::default() }
    }
}
