//! H2O (<https://arxiv.org/abs/2306.14048>): heavy hitters by accumulated attention, and recents.
//! [`Scorer::prefill`] takes column sums of a prompt; steps add their attention to the track
//! [`crate::SCORE`].

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::{Decoding, KeepTopDefaults, Needs, Observation, Reduction, Result, Scorer};

/// H2O (Zhang et al., 2023, section 4): attention summed over all queries since prefill, not
/// normalised by age; half the budget for these heavy hitters, half for the most recent tokens; one
/// eviction after every decode step's attention. A dropped token loses its history.
///
/// Under grouped queries the group's column sums are averaged (`reduction`); the authors' code is
/// for one query head per key-value head.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct H2o {
    /// How a group's query heads become one score.
    pub reduction: Reduction,
}

impl Scorer for H2o {
    const NAME: &'static str = "h2o";

    fn needs(&self) -> Needs {
        Needs { column_sums: true, ..Needs::default() }
    }

    fn prefill(&self, observation: &Observation<'_>, _budget: usize) -> Result<Tensor<3>> {
        column_sums(Self::NAME, observation, self.reduction)
    }

    fn decoding(&self) -> Decoding {
        Decoding::AfterAttention { probabilities: false, accumulate: true }
    }

    fn adds(&self) -> Reduction {
        self.reduction
    }

    fn defaults() -> KeepTopDefaults {
        KeepTopDefaults { recent_share: 0.5, ..KeepTopDefaults::default() }
    }
}

/// The prompt's column sums, reduced to key-value heads, `[B, Hkv, T]`.
pub(super) fn column_sums(
    policy: &'static str,
    observation: &Observation<'_>,
    reduction: Reduction,
) -> Result<Tensor<3>> {
    Ok(reduction.groups(observation.attention_sums(policy)?, observation.dims()[1]))
}
