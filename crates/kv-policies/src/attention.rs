//! Attention of a few queries over a prompt's keys, and what scorers do with it.

use burn::tensor::activation::softmax;
use burn::tensor::{DType, Int, Tensor};
use serde::{Deserialize, Serialize};

/// How the query heads of a group become one score.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reduction {
    /// Their mean.
    #[default]
    Mean,
    /// Their maximum.
    Max,
    /// Their sum.
    Sum,
}

impl Reduction {
    /// `[B, Hq, T]` to `[B, Hkv, T]`.
    pub fn groups(self, scores: Tensor<3>, kv_heads: usize) -> Tensor<3> {
        let [batch, heads, tokens] = scores.dims();
        let grouped = scores.reshape([batch, kv_heads, heads / kv_heads, tokens]);
        let reduced = match self {
            Self::Mean => grouped.mean_dim(2),
            Self::Max => grouped.max_dim(2),
            Self::Sum => grouped.sum_dim(2),
        };
        reduced.squeeze_dim(2)
    }

    /// Attention probabilities of slots, `[S, G]`, to `[S]`.
    pub fn slots(self, probabilities: Tensor<2>) -> Tensor<1> {
        let reduced = match self {
            Self::Mean => probabilities.mean_dim(1),
            Self::Max => probabilities.max_dim(1),
            Self::Sum => probabilities.sum_dim(1),
        };
        reduced.squeeze_dim(1)
    }
}

/// Logits of queries over keys, `scale * q . k` with the usual `1 / sqrt(D)`, f32.
///
/// # Shapes
/// `queries` `[B, Hq, W, D]`, `keys` `[B, Hkv, T, D]`; returns `[B, Hq, W, T]`.
pub(crate) fn logits(queries: &Tensor<4>, keys: &Tensor<4>) -> Tensor<4> {
    let [batch, heads, window, head_dim] = queries.dims();
    let [_, kv_heads, tokens, _] = keys.dims();
    let rows = heads / kv_heads * window;
    let queries = queries.clone().cast(DType::F32).reshape([batch, kv_heads, rows, head_dim]);
    let keys = keys.clone().cast(DType::F32).swap_dims(2, 3);
    let scale = 1.0 / (head_dim as f64).sqrt();
    queries.matmul(keys).mul_scalar(scale).reshape([batch, heads, window, tokens])
}

/// Attention of the last `W` queries over all keys, causal within the window, f32.
///
/// # Shapes
/// `queries` `[B, Hq, W, D]`, `keys` `[B, Hkv, T, D]`; returns `[B, Hq, W, T]`.
pub fn window_attention(queries: &Tensor<4>, keys: &Tensor<4>) -> Tensor<4> {
    let logits = logits(queries, keys);
    let [batch, heads, window, tokens] = logits.dims();
    if window == 1 {
        return softmax(logits, 3);
    }
    let device = logits.device();
    let column = Tensor::<1, Int>::arange(0..tokens as i64, (&device, DType::I32));
    let row = Tensor::<1, Int>::arange(0..window as i64, (&device, DType::I32));
    let last_seen = row.add_scalar((tokens - window) as i32).unsqueeze_dim::<2>(1);
    let hidden = column
        .unsqueeze_dim::<2>(0)
        .expand([window, tokens])
        .greater(last_seen.expand([window, tokens]));
    let hidden = hidden.unsqueeze::<4>().expand([batch, heads, window, tokens]);
    softmax(logits.mask_fill(hidden, f32::NEG_INFINITY), 3)
}

/// The last `window` of the observed queries.
pub(crate) fn last_queries(queries: &Tensor<4>, window: usize) -> Tensor<4> {
    let available = queries.dims()[2];
    let window = window.min(available);
    queries.clone().narrow(2, available - window, window)
}

/// Pooling over neighbouring tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pooling {
    /// Averages; zeros beyond the ends count, as in the authors' code.
    #[default]
    Avg,
    /// Maxima.
    Max,
}

/// Checks an observation window and the pooling's width.
pub(crate) fn check_window(window: usize, kernel: usize) -> Result<(), String> {
    if window == 0 {
        return Err("`window` is 0, expected at least 1".into());
    }
    if kernel.is_multiple_of(2) {
        return Err(format!("`kernel` is {kernel}, expected an odd number"));
    }
    Ok(())
}

/// Pools scores over neighbouring tokens, stride 1.
///
/// # Shapes
/// `[B, H, T]` to the same; `kernel` must be odd.
pub fn pool_scores(scores: Tensor<3>, pooling: Pooling, kernel: usize) -> Tensor<3> {
    let [batch, heads, tokens] = scores.dims();
    if kernel <= 1 || tokens == 0 {
        return scores;
    }
    let side = kernel / 2;
    let device = scores.device();
    let pad = match pooling {
        Pooling::Avg => 0.0,
        Pooling::Max => f32::NEG_INFINITY,
    };
    let pad = Tensor::full([batch, heads, side], pad, (&device, scores.dtype()));
    let padded = Tensor::cat(vec![pad.clone(), scores, pad], 2);
    let shifted = (0..kernel).map(|shift| padded.clone().narrow(2, shift, tokens));
    let pooled = shifted.reduce(|a, b| match pooling {
        Pooling::Avg => a + b,
        Pooling::Max => a.max_pair(b),
    });
    match (pooled, pooling) {
        (Some(sum), Pooling::Avg) => sum.div_scalar(kernel as f64),
        (Some(max), Pooling::Max) => max,
        (None, _) => padded,
    }
}
