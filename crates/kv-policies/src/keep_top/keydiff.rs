//! KeyDiff (<https://arxiv.org/abs/2504.15364>): keys unlike the mean key stay. [`Scorer::prefill`]
//! scores a prompt, and now and then the slots of a cache.

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::{Decoding, KeepTopDefaults, Observation, Result, Scorer};

/// KeyDiff (Park et al., 2025, equation 5): minus the cosine between a key and the mean of all unit
/// keys, so that distinct keys stay. Nothing is protected.
///
/// One shot over the prompt, as kvpress does; the paper's blocks re-prune as the prompt arrives.
/// During decode the slots are re-scored every `interval` (128) steps, the paper's block.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeyDiff {}

impl Scorer for KeyDiff {
    const NAME: &'static str = "keydiff";

    fn prefill(&self, observation: &Observation<'_>, _budget: usize) -> Result<Tensor<3>> {
        let unit = unit_rows(observation.keys);
        let anchor = unit.clone().mean_dim(2);
        let length = anchor.clone().square().sum_dim(3).sqrt().clamp_min(1e-8);
        let cosine = (unit * anchor).sum_dim(3) / length;
        Ok(cosine.neg().squeeze_dim(3))
    }

    fn decoding(&self) -> Decoding {
        Decoding::Rescore { window: 0, raw_queries: 0 }
    }

    fn defaults() -> KeepTopDefaults {
        KeepTopDefaults { interval: 128, ..KeepTopDefaults::default() }
    }
}

/// Rows scaled to length 1, in f32.
pub(super) fn unit_rows(keys: &Tensor<4>) -> Tensor<4> {
    let keys = keys.clone().cast(DType::F32);
    let length = keys.clone().square().sum_dim(3).sqrt().clamp_min(1e-12);
    keys / length
}
