//! Expected Attention (<https://arxiv.org/abs/2510.00636>): the attention that future queries would
//! give. [`Scorer::prefill`] scores a prompt by the moments of its queries, and now and then the
//! slots of a cache.

use burn::tensor::activation::softmax;
use burn::tensor::{DType, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::{
    Decoding, KeepTopDefaults, Needs, Observation, PolicyError, Reduction, Result, Scorer,
};

/// Expected Attention (Devoto et al., 2025, section 3): the attention that future queries are
/// expected to give, if they are Gaussian with the prompt's moments, times `‖v‖₂`. The first 4
/// tokens are always kept and left out of the moments.
///
/// Moments are of queries before RoPE; RoPE's matrix is averaged over the next `future` positions.
/// During decode the slots are re-scored every `interval` (128) steps from the moments of the last
/// 128 queries.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExpectedAttention {
    /// Positions ahead over which RoPE is averaged.
    pub future: usize,
    /// Whether the covariance term is used.
    pub covariance: bool,
    /// Whether scores are multiplied by the value's norm.
    pub value_norm: bool,
    /// Added to scores before they are multiplied by the norm.
    pub epsilon: f64,
    /// First tokens, always kept and left out of the moments.
    pub skipped: usize,
}

/// Queries whose moments count during decode.
const DECODE_QUERIES: usize = 128;

impl Default for ExpectedAttention {
    fn default() -> Self {
        Self { future: 512, covariance: true, value_norm: true, epsilon: 0.0, skipped: 4 }
    }
}

impl Scorer for ExpectedAttention {
    const NAME: &'static str = "expected-attention";

    fn needs(&self) -> Needs {
        Needs { raw_queries: true, ..Needs::default() }
    }

    fn prefill(&self, observation: &Observation<'_>, _budget: usize) -> Result<Tensor<3>> {
        let missing =
            PolicyError::MissingObservation { policy: Self::NAME, what: "queries before RoPE" };
        let queries = observation.raw_queries.clone().ok_or(missing)?.cast(DType::F32);
        let [batch, kv_heads, tokens, head_dim] = observation.dims();
        let heads = queries.dims()[1];
        let device = queries.device();
        let skipped = self.skipped.min(tokens.saturating_sub(1));
        let counted = tokens - skipped;

        // A prompt's first queries are left out, since they differ from the others as its first
        // keys do. The last queries, which decode steps show, do not contain them.
        let queries =
            if observation.decoding { queries } else { queries.narrow(2, skipped, counted) };
        let samples = queries.dims()[2];
        let mean = queries.clone().mean_dim(2);
        let rotation = self.mean_rotation(observation, head_dim);
        let rotation = Tensor::<2>::from_data(
            TensorData::new(rotation, [head_dim, head_dim]),
            (&device, DType::F32),
        )
        .unsqueeze::<4>();
        // Row vectors: x -> x Rᵀ.
        let rotation_t = rotation.clone().transpose().expand([batch, heads, head_dim, head_dim]);
        let rotated_mean = mean.clone().matmul(rotation_t.clone());

        let group = heads / kv_heads;
        let keys = observation.keys.clone().cast(DType::F32).narrow(2, skipped, counted);
        let keys_t = keys.clone().swap_dims(2, 3);
        let per_group = |x: Tensor<4>, rows: usize| x.reshape([batch, kv_heads, rows, head_dim]);
        let scale = 1.0 / (head_dim as f64).sqrt();
        let mut logits = per_group(rotated_mean, group).matmul(keys_t).mul_scalar(scale);
        if self.covariance {
            let centred = queries - mean;
            let covariance = centred.clone().swap_dims(2, 3).matmul(centred);
            let covariance = covariance.div_scalar(samples as f64);
            let rotation = rotation.expand([batch, heads, head_dim, head_dim]);
            let covariance = rotation.matmul(covariance).matmul(rotation_t);
            let covariance = covariance.reshape([batch, kv_heads, group, head_dim, head_dim]);
            let quadratic: Vec<Tensor<4>> = (0..group)
                .map(|member| {
                    let one = covariance.clone().narrow(2, member, 1);
                    let one = one.reshape([batch, kv_heads, head_dim, head_dim]);
                    (keys.clone().matmul(one) * keys.clone()).sum_dim(3).swap_dims(2, 3)
                })
                .collect();
            let quadratic = Tensor::cat(quadratic, 2);
            logits = logits + quadratic.div_scalar(2.0 * head_dim as f64);
        }
        let probabilities = softmax(logits, 3).reshape([batch, heads, counted]);
        let mut scores = Reduction::Mean.groups(probabilities, kv_heads);
        if self.value_norm {
            let values = observation.values.clone().cast(DType::F32).narrow(2, skipped, counted);
            let norms = values.square().sum_dim(3).sqrt().squeeze_dim(3);
            scores = scores.add_scalar(self.epsilon) * norms;
        }
        let first = Tensor::full([batch, kv_heads, skipped], f32::INFINITY, (&device, DType::F32));
        Ok(Tensor::cat(vec![first, scores], 2))
    }

    fn validate(&self) -> std::result::Result<(), String> {
        if self.future == 0 { Err("`future` is 0, expected at least 1".into()) } else { Ok(()) }
    }

    fn decoding(&self) -> Decoding {
        Decoding::Rescore { window: 0, raw_queries: DECODE_QUERIES }
    }

    fn defaults() -> KeepTopDefaults {
        KeepTopDefaults { sinks: 4, interval: 128, ..KeepTopDefaults::default() }
    }
}

impl ExpectedAttention {
    /// RoPE's rotation averaged over the coming positions, `[D, D]`; the identity without RoPE.
    fn mean_rotation(&self, observation: &Observation<'_>, head_dim: usize) -> Vec<f32> {
        let mut matrix = vec![0.0f32; head_dim * head_dim];
        let half = head_dim / 2;
        let start = observation.prompt_tokens;
        for pair in 0..half {
            let (mut cos, mut sin) = (1.0, 0.0);
            if let Some(frequency) = observation.inverse_frequencies.get(pair) {
                let angles = (start..start + self.future).map(|at| at as f64 * frequency);
                let count = self.future as f64;
                cos = angles.clone().map(f64::cos).sum::<f64>() / count;
                sin = angles.map(f64::sin).sum::<f64>() / count;
            }
            let (a, b) = (pair, pair + half);
            matrix[a * head_dim + a] = cos as f32;
            matrix[a * head_dim + b] = -sin as f32;
            matrix[b * head_dim + a] = sin as f32;
            matrix[b * head_dim + b] = cos as f32;
        }
        matrix
    }
}
