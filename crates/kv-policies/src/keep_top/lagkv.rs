//! LagKV (<https://arxiv.org/abs/2504.04704>): keys and values score by their spread relative to
//! the next chunk. [`Scorer::prefill`] scores a prompt, and now and then the slots of a cache.

use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{rankings, scatter_scalars};
use serde::{Deserialize, Serialize};

use crate::{Decoding, KeepTopDefaults, Observation, Result, Scorer};

/// LagKV (Liang et al., 2025, section 3): behind the sinks, the prompt is cut into chunks of `lag`
/// tokens; each chunk is normalised per channel by the range of the next one, and a token's score
/// is the standard deviation over its channels, softmaxed over the chunk, averaged over keys and
/// values. Sinks, the last full chunk and what is behind it are always kept.
///
/// Scores are ranks within the chunk, so that keeping the top cuts the same share of every chunk
/// (as in kvpress). A budget below the number of these tokens drops the oldest of them, where
/// kvpress's choice is arbitrary. Prompts of fewer than two chunks keep sinks and the newest
/// tokens. Channels whose range is zero count as 0 instead of NaN. During decode the slots are
/// re-scored every `interval` (128) steps, when a further chunk is full.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LagKv {
    /// Tokens of a chunk.
    pub lag: usize,
    /// First tokens, always kept.
    pub first: usize,
}

impl Default for LagKv {
    fn default() -> Self {
        Self { lag: 128, first: 4 }
    }
}

impl Scorer for LagKv {
    const NAME: &'static str = "lagkv";

    fn prefill(&self, observation: &Observation<'_>, _budget: usize) -> Result<Tensor<3>> {
        observation.once(&format!("{self:?}"), || self.scores(observation))
    }

    fn validate(&self) -> std::result::Result<(), String> {
        if self.lag == 0 { Err("`lag` is 0, expected at least 1".into()) } else { Ok(()) }
    }

    fn decoding(&self) -> Decoding {
        Decoding::Rescore { window: 0, raw_queries: 0 }
    }

    fn defaults() -> KeepTopDefaults {
        KeepTopDefaults { sinks: 4, interval: 128, ..KeepTopDefaults::default() }
    }
}

impl LagKv {
    /// `[B, Hkv, T]`
    fn scores(&self, observation: &Observation<'_>) -> Result<Tensor<3>> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        let (device, heads) = (observation.keys.device(), batch * kv_heads);
        let first = self.first.min(tokens);
        let chunks = (tokens - first) / self.lag;
        // Tokens that always stay: sinks have the highest scores, then the newest.
        let row = (0..tokens).map(|token| match token < first {
            true => f32::INFINITY,
            false => 1.0 + token as f32 / tokens as f32,
        });
        let mut scores = upload(&row.collect::<Vec<_>>().repeat(heads), &device);
        if chunks >= 2 {
            let scored = chunks - 1;
            let rows = Tensor::cat(vec![observation.keys.clone(), observation.values.clone()], 0);
            let spreads = self.spread_softmax(rows, first, chunks);
            let both = spreads.clone().narrow(0, 0, heads) + spreads.narrow(0, heads, heads);
            // Ranks within the chunk over `lag`, below 1.
            let ranked = rankings(both.reshape([heads * scored, self.lag]));
            let ranked = ranked.map_err(kv_core::Error::from)?;
            let firsts = (0..heads).flat_map(|head| {
                (0..scored).map(move |chunk| (head * tokens + first + chunk * self.lag) as i32)
            });
            let firsts = firsts.collect::<Vec<_>>();
            let firsts = Tensor::<1, Int>::from_data(firsts.as_slice(), (&device, DType::I32));
            let slots = ranked.cast(DType::I32) + firsts.unsqueeze_dim::<2>(1);
            let ranks = (0..self.lag).rev().map(|order| order as f32 / self.lag as f32);
            let ranks = upload(&ranks.collect::<Vec<_>>().repeat(heads * scored), &device);
            scatter_scalars(&mut scores, slots.flatten(0, 1), ranks)
                .map_err(kv_core::Error::from)?;
        }
        Ok(scores.reshape([batch, kv_heads, tokens]))
    }

    /// Softmax over each chunk's tokens of the standard deviation of their channels, normalised by
    /// the next chunk's range: `[2 B, H, T, D]` to `[2 B * H, chunks - 1, lag]`.
    fn spread_softmax(&self, rows: Tensor<4>, first: usize, chunks: usize) -> Tensor<3> {
        let [batch, heads, _, head_dim] = rows.dims();
        let (heads, scored) = (batch * heads, chunks - 1);
        let rows = rows.narrow(2, first, chunks * self.lag).cast(DType::F32);
        let rows = rows.reshape([heads, chunks, self.lag, head_dim]);
        let next = rows.clone().narrow(1, 1, scored);
        let (low, high) = (next.clone().min_dim(2), next.max_dim(2));
        let range: Tensor<4> = high - low.clone();
        let flat = range.clone().lower_equal_scalar(0.0);
        // Divided by this, a channel without a range is lost beside the others.
        let range = range.mask_fill(flat, f32::MAX);
        let normalised = (rows.narrow(1, 0, scored) - low) / range;
        let spread = normalised.clone() - normalised.mean_dim(3);
        let squares = spread.square().sum_dim(3).div_scalar((head_dim as f64 - 1.0).max(1.0));
        softmax(squares.sqrt(), 2).squeeze_dim(3)
    }
}

fn upload(numbers: &[f32], device: &Device) -> Tensor<1> {
    Tensor::from_data(numbers, (device, DType::F32))
}
