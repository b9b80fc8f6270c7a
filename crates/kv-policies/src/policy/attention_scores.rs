//! Attention of a few queries over a prompt's keys, and what scorers do with it.

use burn::tensor::activation::softmax;
use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{GroupReduction, RowPool, causal_softmax, pool_rows};
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
    // Queries are scaled rather than logits, which are many more.
    let queries = queries.clone().cast(DType::F32).mul_scalar(1.0 / (head_dim as f64).sqrt());
    let queries = queries.reshape([batch, kv_heads, rows, head_dim]);
    let keys = keys.clone().cast(DType::F32).swap_dims(2, 3);
    queries.matmul(keys).reshape([batch, heads, window, tokens])
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

/// Rows of matrices are filled up to a multiple of this many numbers: CUDA pads others, and copies
/// them whenever they are reshaped.
pub(crate) const ROW: usize = 128;

/// The tensor with zeros behind its third dimension, up to `length`.
pub(crate) fn filled_up(tensor: Tensor<4>, length: usize) -> Tensor<4> {
    let [batch, heads, own, head_dim] = tensor.dims();
    if length <= own {
        return tensor;
    }
    let missing = [batch, heads, length - own, head_dim];
    let zeros = Tensor::zeros(missing, (&tensor.device(), tensor.dtype()));
    Tensor::cat(vec![tensor, zeros], 2)
}

/// [`recent_attention`] of a batch of one. Zero queries of no weight behind the last one see the
/// zero keys that fill up the rows of the matrix.
fn recent_attention_of_one(queries: &Tensor<4>, keys: &Tensor<4>, last: f32) -> Result<Tensor<3>> {
    let [_, heads, count, _] = queries.dims();
    let (tokens, device) = (keys.dims()[2], queries.device());
    let width = tokens.next_multiple_of(ROW);
    let rows = count + width - tokens;
    let keys = filled_up(keys.clone().cast(DType::F32), width);
    let queries = filled_up(queries.clone().cast(DType::F32), rows);
    let weight = |row: usize| match row < count {
        true => 1.0 + (last - 1.0) * row as f32 / (count.max(2) - 1) as f32,
        false => 0.0,
    };
    let most = (BLOCK_BYTES / (4 * heads * width).max(1)).clamp(QUERIES[0], QUERIES[1]);
    // The last block comes first, since it sees all keys.
    let mut sum: Option<Tensor<3>> = None;
    let mut end = rows;
    while end > 0 {
        let start = block_start(end, most, width - rows);
        // The block's queries see nothing behind the last of them.
        let seen = width - rows + end;
        let own = queries.clone().narrow(2, start, end - start);
        let attention = window_weights(&own, &keys.clone().narrow(2, 0, seen))?;
        let weights: Vec<f32> = (start..end).map(weight).collect();
        let weights = Tensor::<1>::from_data(weights.as_slice(), (&device, DType::F32));
        let weighted = attention * weights.reshape([1, 1, end - start, 1]);
        let weighted: Tensor<3> = weighted.sum_dim(2).squeeze_dim(2);
        sum = Some(match sum {
            None => weighted,
            Some(sum) => {
                let seen_sum = sum.clone().narrow(2, 0, seen) + weighted;
                sum.slice_assign([0..1, 0..heads, 0..seen], seen_sum)
            }
        });
        end = start;
    }
    let none = || Tensor::zeros([1, heads, width], (&device, DType::F32));
    Ok(sum.unwrap_or_else(none).narrow(2, 0, tokens).div_scalar(count as f64))
}

/// Where a block of at most `most` queries begins that ends at `end`: where the queries before it
/// see a multiple of [`ROW`] keys, if that leaves queries. All queries see the first `before` keys.
fn block_start(end: usize, most: usize, before: usize) -> usize {
    let Some(start) = end.checked_sub(most) else { return 0 };
    let whole = (before + start).next_multiple_of(ROW) - before;
    if start > 0 && whole < end { whole } else { start }
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

impl From<Pooling> for RowPool {
    fn from(pooling: Pooling) -> Self {
        match pooling {
            Pooling::Avg => Self::Average,
            Pooling::Max => Self::Maximum,
        }
    }
}

/// Pools scores over neighbouring tokens, stride 1.
///
/// # Shapes
/// `scores` `[B, H, T]`, f32; returns `[B, H, T]`.
///
/// # Errors
/// [`crate::PolicyError`] for scores of another type, and for an even `kernel`.
pub fn pool_scores(scores: Tensor<3>, pooling: Pooling, kernel: usize) -> Result<Tensor<3>> {
    let [batch, heads, tokens] = scores.dims();
    if kernel == 1 || batch * heads * tokens == 0 {
        return Ok(scores);
    }
    let rows = scores.reshape([batch * heads, tokens]);
    let pooled = pool_rows(rows, kernel, pooling.into()).map_err(kv_core::Error::from)?;
    Ok(pooled.reshape([batch, heads, tokens]))
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

    /// Two blocks and no whole row: the sums are those of the whole matrix.
    #[test]
    fn blocks_of_recent_attention_add_up() {
        for tested in devices() {
            for [rows, tokens] in [[1100, 1237], [1100, 1100], [5, 130], [1, 256]] {
                let mut numbers = Numbers::new(rows as u64);
                let queries = numbers.tensor([2, 2, rows, 8], &tested.device);
                let keys = numbers.tensor([2, 1, tokens, 8], &tested.device);
                let weights: Vec<f32> = (0..rows)
                    .map(|row| 1.0 + 0.2 * row as f32 / (rows.max(2) - 1) as f32)
                    .collect();
                let weights = Tensor::<1>::from_data(weights.as_slice(), &tested.device);
                let whole = window_attention(&queries, &keys) * weights.reshape([1, 1, rows, 1]);
                let expected = whole.sum_dim(2).div_scalar(rows as f64);
                let expected = expected.try_into_vec_as::<f32>().unwrap();
                let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
                let actual = recent_attention(&queries, &keys, 1.2).unwrap();
                assert_eq!(actual.dims(), [2, 2, tokens]);
                let actual = actual.try_into_vec_as::<f32>().unwrap();
                let error = relative_error(&actual, &expected);
                assert!(error < 1e-5, "{} {rows} of {tokens}: {error}", tested.name);
            }
        }
    }

    #[test]
    fn blocks_begin_where_queries_see_whole_rows() {
        assert_eq!(block_start(820, 455, 3276), 436);
        assert_eq!((3276 + block_start(820, 455, 3276)) % ROW, 0);
        assert_eq!(block_start(300, 455, 3276), 0);
        // A block of fewer queries than a row has begins where it may.
        assert_eq!(block_start(100, 16, 28), 84);
    }
}
