//! VATP (<https://arxiv.org/abs/2406.12335>): H2O's attention times the norm of the value.
//! [`Scorer::prefill`] is the product for a prompt; steps add theirs to the track
//! [`crate::SCORE`].

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::h2o::column_sums;
use crate::policy::attention_scores::window_weights;
use crate::{Decoding, KeepTopDefaults, Needs, Observation, Reduction, Result, Scorer};

/// VATP (Guo et al., 2024, equation 3) over H2O: accumulated attention times `‖v‖₁`; the first 20
/// tokens are always kept, inside the heavy half. Attention is reduced over the group before the
/// product, since values belong to key-value heads.
///
/// `history` gives the paper's other form, over Scissorhands: the mean attention of the prompt's
/// last `history` (400) queries instead of its column sums.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Vatp {
    /// How a group's query heads become one score.
    pub reduction: Reduction,
    /// Queries of the prompt that count, for the Scissorhands form; `None` for H2O's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<usize>,
}

impl Scorer for Vatp {
    const NAME: &'static str = "vatp";

    fn needs(&self) -> Needs {
        match self.history {
            Some(window) => Needs { window, ..Needs::default() },
            None => Needs { column_sums: true, ..Needs::default() },
        }
    }

    fn prefill(&self, observation: &Observation<'_>, _budget: usize) -> Result<Tensor<3>> {
        let sums = match self.history {
            None => column_sums(Self::NAME, observation, self.reduction)?,
            Some(history) => {
                let queries = observation.last_queries(Self::NAME, history)?;
                let sums = window_weights(&queries, observation.keys)?.sum_dim(2);
                let mean = sums.squeeze_dim(2).div_scalar(history as f64);
                self.reduction.groups(mean, observation.dims()[1])
            }
        };
        let norms = observation.values.clone().cast(DType::F32).abs().sum_dim(3);
        Ok(sums * norms.squeeze_dim(3))
    }

    fn validate(&self) -> std::result::Result<(), String> {
        match self.history {
            Some(0) => Err("`history` is 0, expected at least 1".into()),
            _ => Ok(()),
        }
    }

    fn decoding(&self) -> Decoding {
        Decoding::AfterAttention { probabilities: false, accumulate: true }
    }

    fn adds(&self) -> Reduction {
        self.reduction
    }

    fn weighs_values(&self) -> bool {
        true
    }

    fn defaults() -> KeepTopDefaults {
        KeepTopDefaults { sinks: 20, recent_share: 0.5, interval: 1 }
    }
}
