//! KNorm (<https://arxiv.org/abs/2406.11430>): keys of small norms stay. [`Scorer::prefill`] scores
//! prompts, [`Scorer::decode`] the slots of a step.

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::{DecodeView, Decoding, Observation, Result, Scorer};

/// KNorm (Devoto et al., 2024, section 3): the smallest `‖k‖₂` are kept. RoPE preserves the norm.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KNorm {}

impl Scorer for KNorm {
    const NAME: &'static str = "knorm";

    fn prefill(&self, observation: &Observation<'_>, _budget: usize) -> Result<Tensor<3>> {
        let keys = observation.keys.clone().cast(DType::F32);
        Ok(keys.square().sum_dim(3).sqrt().neg().squeeze_dim(3))
    }

    fn decoding(&self) -> Decoding {
        Decoding::AfterAttention { probabilities: false, accumulate: false }
    }

    fn decode(&self, view: &DecodeView<'_>) -> Result<Tensor<1>> {
        let keys = view.cache.keys().clone().cast(DType::F32);
        Ok(keys.square().sum_dim(1).sqrt().neg().squeeze_dim(1))
    }
}
