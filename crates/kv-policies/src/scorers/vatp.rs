use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::h2o::column_sums;
use crate::{
    DecodeView, Decoding, FamilyDefaults, Needs, Observation, Reduction, Result, Scorer,
};

/// VATP (Guo et al., 2024, equation 3) over H2O: accumulated attention times `‖v‖₁`; the first 20
/// tokens are always kept, inside the heavy half. Attention is reduced over the group before the
/// product, since values belong to key-value heads.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Vatp {
    /// How a group's query heads become one score.
    pub reduction: Reduction,
}

impl Scorer for Vatp {
    const NAME: &'static str = "vatp";

    fn needs(&self) -> Needs {
        Needs { column_sums: true, ..Needs::default() }
    }

    fn prefill(&self, observation: &Observation<'_>, _budget: usize) -> Result<Tensor<3>> {
        let sums = column_sums(Self::NAME, observation, self.reduction)?;
        let norms = observation.values.clone().cast(DType::F32).abs().sum_dim(3);
        Ok(sums * norms.squeeze_dim(3))
    }

    fn decoding(&self) -> Decoding {
        Decoding::AfterAttention { probabilities: true, accumulate: true, queries: 0 }
    }

    fn decode(&self, view: &DecodeView<'_>) -> Result<Tensor<1>> {
        view.accumulated()
    }

    fn contribution(&self, view: &DecodeView<'_>) -> Result<Tensor<1>> {
        let probabilities = view.probabilities()?.clone().mean_dim(1);
        let norms = view.cache.values().clone().cast(DType::F32).abs().sum_dim(1);
        Ok((probabilities * norms).squeeze_dim(1))
    }

    fn defaults() -> FamilyDefaults {
        FamilyDefaults { sinks: 20, recent_share: 0.5, interval: 1 }
    }
}
