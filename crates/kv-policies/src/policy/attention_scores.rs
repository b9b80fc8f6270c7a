//! Attention of a few queries over a prompt's keys, and what scorers do with it.

use burn::tensor::activation::softmax;
use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{GroupReduction, causal_softmax};
use serde::{Deserialize, Serialize};

use crate::Result;

/// How the query heads of a group become one score.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reduction {
    /// The mean over the group.
    #[default]
    Mean,
    /// The maximum over the group.
    Max,
    /// The sum over the group.
    Sum,
}

impl From<Reduction> for GroupReduction {
    fn from(reduction: Reduction) -> Self {
        match reduction {
            Reduction::Mean => Self::Mean,
            Reduction::Max => Self::Max,
            Reduction::Sum => Self::Sum,
        }
    }
}

impl Reduction {
    /// Reduces scores `[B, Hq, T]` to `[B, Hkv, T]`.
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

    /// Reduces attention probabilities of slots, `[S, G]`, to `[S]`.
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

/// Logits of the last `W` queries over all keys, −∞ for keys behind a query, f32.
///
/// # Shapes
/// The shapes of [`window_attention`].
pub(crate) fn window_logits(queries: &Tensor<4>, keys: &Tensor<4>) -> Tensor<4> {
    let logits = logits(queries, keys);
    let [batch, heads, window, tokens] = logits.dims();
    if window == 1 {
        return logits;
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
    logits.mask_fill(hidden, f32::NEG_INFINITY)
}

/// Attention of the last `W` queries over all keys, causal within the window, f32.
///
/// # Shapes
/// `queries` `[B, Hq, W, D]`, `keys` `[B, Hkv, T, D]`; returns `[B, Hq, W, T]`.
pub fn window_attention(queries: &Tensor<4>, keys: &Tensor<4>) -> Tensor<4> {
    softmax(window_logits(queries, keys), 3)
}

/// [`window_attention`] by a kernel, which has no gradients.
pub(crate) fn window_weights(queries: &Tensor<4>, keys: &Tensor<4>) -> Result<Tensor<4>> {
    let logits = logits(queries, keys);
    let [batch, heads, window, tokens] = logits.dims();
    let (weights, _) = causal_softmax(logits.reshape([batch * heads, window, tokens]))
        .map_err(kv_core::Error::from)?;
    Ok(weights.reshape([batch, heads, window, tokens]))
}

/// How much more the last query counts than the first of the recents, by PyramidInfer.
pub(crate) const LAST_WEIGHT: f32 = 1.2;

/// Mean attention of the last `W` queries, weighted from 1 for the first to `last` for the last of
/// them, as in PyramidInfer. It goes sequence by sequence and block by block, so that few rows of
/// the matrix are in memory at a time.
///
/// # Shapes
/// `queries` `[B, Hq, W, D]`, `keys` `[B, Hkv, T, D]`; returns `[B, Hq, T]`.
pub(crate) fn recent_attention(
    queries: &Tensor<4>,
    keys: &Tensor<4>,
    last: f32,
) -> Result<Tensor<3>> {
    let of = |tensor: &Tensor<4>, row| tensor.clone().narrow(0, row, 1);
    let rows = (0..queries.dims()[0])
        .map(|row| recent_attention_of_one(&of(queries, row), &of(keys, row), last));
    Ok(Tensor::cat(rows.collect::<Result<_>>()?, 0))
}

/// Bytes that a block of [`recent_attention`]'s matrix should take. A block of the fewest queries
/// may take more.
const BLOCK_BYTES: usize = 64 << 20;
/// The fewest and the most queries of a block.
const QUERIES: [usize; 2] = [16, 1024];

/// [`recent_attention`] of a batch of one.
fn recent_attention_of_one(queries: &Tensor<4>, keys: &Tensor<4>, last: f32) -> Result<Tensor<3>> {
    let [_, heads, rows, _] = queries.dims();
    let tokens = keys.dims()[2];
    let most = (BLOCK_BYTES / (4 * heads * tokens).max(1)).clamp(QUERIES[0], QUERIES[1]);
    let device = queries.device();
    let keys = keys.clone().cast(DType::F32);
    let mut sum = Tensor::<3>::zeros([1, heads, tokens], (&device, DType::F32));
    for start in (0..rows).step_by(most) {
        let block = most.min(rows - start);
        // The block's queries see nothing behind the last of them.
        let seen = tokens - rows + start + block;
        let queries = queries.clone().narrow(2, start, block);
        let attention = window_weights(&queries, &keys.clone().narrow(2, 0, seen))?;
        let weight = |row: usize| 1.0 + (last - 1.0) * row as f32 / (rows.max(2) - 1) as f32;
        let weights: Vec<f32> = (start..start + block).map(weight).collect();
        let weights = Tensor::<1>::from_data(weights.as_slice(), (&device, DType::F32));
        let weighted = attention * weights.reshape([1, 1, block, 1]);
        let seen_sum = sum.clone().narrow(2, 0, seen) + weighted.sum_dim(2).squeeze_dim(2);
        sum = sum.slice_assign([0..1, 0..heads, 0..seen], seen_sum);
    }
    Ok(sum.div_scalar(rows as f64))
}

/// `ln Σ w exp(q . k / sqrt(D))` over the last `W` queries, with [`recent_attention`]'s weights
/// `w`. Keys have no score of queries before them. Returns logarithms, since sums of exponentials
/// may overflow.
///
/// # Shapes
/// The shapes of [`recent_attention`].
pub(crate) fn recent_exponentials(queries: &Tensor<4>, keys: &Tensor<4>, last: f32) -> Tensor<3> {
    let rows = queries.dims()[2];
    let weight = |row: usize| 1.0 + (last - 1.0) * row as f32 / (rows.max(2) - 1) as f32;
    let weights: Vec<f32> = (0..rows).map(|row| weight(row).ln()).collect();
    let weights = Tensor::<1>::from_data(weights.as_slice(), (&queries.device(), DType::F32));
    let logits = window_logits(queries, keys) + weights.reshape([1, 1, rows, 1]);
    // The last query sees every key.
    let top = logits.clone().max_dim(2);
    let sums = (logits - top.clone()).exp().sum_dim(2);
    (sums.log() + top).squeeze_dim(2)
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

/// An observation window that takes at most half of a budget, and at least one token.
pub(crate) fn fitted_window(window: usize, budget: usize) -> usize {
    window.min((budget / 2).max(1))
}

/// Checks an observation window and the pooling's width.
pub(crate) fn check_window(window: usize, kernel: usize) -> std::result::Result<(), String> {
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
/// `scores` `[B, H, T]`; returns `[B, H, T]`. `kernel` must be odd.
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

#[cfg(test)]
mod tests {
    use kv_testing::{Numbers, devices, relative_error};

    use super::*;

    #[test]
    fn kernel_and_tensor_operations_agree() {
        for tested in devices() {
            for [window, tokens] in [[1, 40], [7, 40], [40, 40], [3, 5]] {
                let mut numbers = Numbers::new(window as u64);
                let mut tensor = |heads: usize, rows: usize| {
                    let flat = numbers.tensor([2 * heads * rows, 16], &tested.device);
                    flat.reshape([2, heads, rows, 16]).mul_scalar(3.0)
                };
                let (queries, keys) = (tensor(6, window), tensor(2, tokens));
                let [kernel, operations] =
                    [window_weights(&queries, &keys).unwrap(), window_attention(&queries, &keys)]
                        .map(|weights| weights.try_into_vec_as::<f32>().unwrap());
                let expected: Vec<f64> = operations.into_iter().map(f64::from).collect();
                let error = relative_error(&kernel, &expected);
                assert!(error < 1e-5, "{} {window} of {tokens}: {error}", tested.name);
            }
        }
    }
}
