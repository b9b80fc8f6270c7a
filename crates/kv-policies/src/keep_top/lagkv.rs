//! LagKV (<https://arxiv.org/abs/2504.04704>): keys and values score by their spread relative to
//! the next chunk. [`Scorer::prefill`] scores a prompt, and now and then the slots of a cache.

use burn::tensor::{DType, Tensor, TensorData};
use kv_core::{rank, read_f32};
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
        let [batch, kv_heads, tokens, head_dim] = observation.dims();
        let first = self.first.min(tokens);
        let chunks = (tokens - first) / self.lag;
        let row: Vec<f32>;
        let scores = if chunks < 2 {
            row = (0..tokens)
                .map(|token| if token < first { f32::INFINITY } else { token as f32 })
                .collect();
            row.repeat(batch * kv_heads)
        } else {
            let keys = read_f32("keys", observation.keys.clone())?;
            let values = read_f32("values", observation.values.clone())?;
            let width = tokens * head_dim;
            let heads = keys.chunks(width).zip(values.chunks(width));
            heads.flat_map(|(keys, values)| self.score(keys, values, tokens, head_dim)).collect()
        };
        let data = TensorData::new(scores, [batch, kv_heads, tokens]);
        Ok(Tensor::from_data(data, (&observation.keys.device(), DType::F32)))
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
    /// One head's scores: rank within the chunk over `lag`, below 1. Tokens that always stay have
    /// scores above 1: sinks the highest, then the newest.
    fn score(&self, keys: &[f32], values: &[f32], tokens: usize, head_dim: usize) -> Vec<f32> {
        let mut scores: Vec<f32> =
            (0..tokens).map(|token| 1.0 + token as f32 / tokens as f32).collect();
        scores[..self.first].fill(f32::INFINITY);
        let chunk_width = self.lag * head_dim;
        let chunks = (tokens - self.first) / self.lag;
        for chunk in 0..chunks - 1 {
            let at = self.first * head_dim + chunk * chunk_width;
            let halves = [keys, values].map(|rows| {
                let (chunk, next) = rows[at..at + 2 * chunk_width].split_at(chunk_width);
                spread_softmax(chunk, next, head_dim)
            });
            let score: Vec<f32> =
                halves[0].iter().zip(&halves[1]).map(|(k, v)| (k + v) / 2.0).collect();
            let start = self.first + chunk * self.lag;
            for (order, &token) in rank(&score).iter().rev().enumerate() {
                scores[start + token as usize] = order as f32 / self.lag as f32;
            }
        }
        scores
    }
}

/// Softmax over a chunk's tokens of the standard deviation of their normalised channels.
fn spread_softmax(chunk: &[f32], next: &[f32], head_dim: usize) -> Vec<f32> {
    let mut low = vec![f32::INFINITY; head_dim];
    let mut high = vec![f32::NEG_INFINITY; head_dim];
    for row in next.chunks(head_dim) {
        for (channel, &x) in row.iter().enumerate() {
            low[channel] = low[channel].min(x);
            high[channel] = high[channel].max(x);
        }
    }
    let spreads: Vec<f32> = chunk
        .chunks(head_dim)
        .map(|row| {
            let normalised = row.iter().enumerate().map(|(channel, x)| {
                let range = high[channel] - low[channel];
                if range > 0.0 { (x - low[channel]) / range } else { 0.0 }
            });
            let normalised: Vec<f32> = normalised.collect();
            let mean = normalised.iter().sum::<f32>() / head_dim as f32;
            let squares: f32 = normalised.iter().map(|x| (x - mean).powi(2)).sum();
            (squares / (head_dim as f32 - 1.0).max(1.0)).sqrt()
        })
        .collect();
    let max = spreads.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exponentials: Vec<f32> = spreads.iter().map(|spread| (spread - max).exp()).collect();
    let sum: f32 = exponentials.iter().sum();
    exponentials.into_iter().map(|x| x / sum).collect()
}
