//! StreamingLLM (<https://arxiv.org/abs/2309.17453>): the first tokens and the most recent ones
//! stay. The score is the position; the family's `sinks` protect the first tokens.

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::policy::state_tensors::check_countable;
use crate::{DecodeView, Decoding, KeepTopDefaults, Observation, Result, Scorer};

/// StreamingLLM (Xiao et al., 2023, section 3.2): the first 4 tokens (attention sinks) and the most
/// recent ones, in prefill and before every decode step's attention, so that the budget includes
/// the incoming token.
///
/// Keys keep the rotation of their original positions, as kvpress does; the authors cache unrotated
/// keys and rotate by slot.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StreamingLlm {}

impl Scorer for StreamingLlm {
    const NAME: &'static str = "streaming-llm";

    fn prefill(&self, observation: &Observation<'_>, _budget: usize) -> Result<Tensor<3>> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        check_countable(Self::NAME, observation.prompt_tokens)?;
        let positions = observation.positions.clone().float().cast(DType::F32);
        Ok(positions.unsqueeze_dim::<3>(1).expand([batch, kv_heads, tokens]))
    }

    fn decoding(&self) -> Decoding {
        Decoding::BeforeAttention
    }

    fn decode(&self, view: &DecodeView<'_>) -> Result<Tensor<1>> {
        Ok(view.cache.positions().clone().float().cast(DType::F32))
    }

    fn defaults() -> KeepTopDefaults {
        KeepTopDefaults { sinks: 4, ..KeepTopDefaults::default() }
    }
}
