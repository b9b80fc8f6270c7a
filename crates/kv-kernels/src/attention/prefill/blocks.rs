//! Prefill attention by the tensor library's matrix products, one block of queries after another:
//! on every GPU without the Hopper kernel, and on the CPU where it is forced.

use std::ops::Range;

use burn::tensor::{Bool, DType, Int, Tensor, TensorData};

use super::{Mask, PrefillOptions, PrefillOutput, PrefillWindow};
use crate::KernelError;
use crate::attention::causal_softmax::causal_softmax;

/// Bytes that the logits of a block should take. A block of the fewest queries may take more.
const BLOCK_BYTES: usize = 64 << 20;
/// The fewest and the most queries of a block.
const QUERIES: [usize; 2] = [16, 256];

/// Attention of `query` `[B, Hq, N, D]`; the last query is at the last key.
pub(super) fn attend(
    query: &Tensor<4>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    options: &PrefillOptions,
) -> Result<PrefillOutput, KernelError> {
    let [batch, heads, queries, head_dim] = query.dims();
    let [_, kv_heads, tokens, _] = keys.dims();
    let group = heads / kv_heads;
    let (dtype, device) = (query.dtype(), query.device());
    let scale = 1.0 / (head_dim as f64).sqrt();
    let block = (BLOCK_BYTES / (4 * batch * heads * tokens.max(1))).clamp(QUERIES[0], QUERIES[1]);
    let mask = options.mask();
    let counted = options.column_sums.map_or(0, |counted| counted.min(queries));

    // A product has the dtype of its factors. Logits must not be rounded to f16 or bf16, which
    // leave large logits few digits.
    let keys = keys.clone().cast(DType::F32);
    let query = query.clone().cast(DType::F32).mul_scalar(scale);
    let query = query.reshape([batch, kv_heads, group, queries, head_dim]);
    let mut outputs = Vec::new();
    let mut log_sums = Vec::new();
    let mut sums = options
        .column_sums
        .map(|_| Tensor::<4>::zeros([batch, kv_heads, group, tokens], (&device, DType::F32)));
    for start in (0..queries).step_by(block) {
        let rows = block.min(queries - start);
        let first = tokens - queries + start;
        let ranges = mask.seen(first..first + rows);
        let part = |tensor: &Tensor<4>| {
            let part = |range: &Range<usize>| tensor.clone().slice_dim(2, range.clone());
            match ranges.as_slice() {
                // One range is a view; several are joined by a copy.
                [range] => part(range),
                ranges => Tensor::cat(ranges.iter().map(part).collect(), 2),
            }
        };
        let seen: usize = ranges.iter().map(Range::len).sum();
        let q = query.clone().narrow(3, start, rows);
        let q = q.reshape([batch, kv_heads, group * rows, head_dim]);
        let logits = q.matmul(part(&keys).swap_dims(2, 3));
        let logits = if mask.window == PrefillWindow::All {
            logits.reshape([batch * heads, rows, seen])
        } else {
            let hidden = hidden(&mask, first..first + rows, &ranges, &logits);
            let hidden = hidden.reshape([1, rows, seen]).expand([group, rows, seen]);
            let hidden = hidden.reshape([1, 1, group * rows, seen]);
            let hidden = hidden.expand([batch, kv_heads, group * rows, seen]);
            // Rows of one query each, to which all keys of the row are shown.
            let masked = logits.mask_fill(hidden, f32::NEG_INFINITY);
            masked.reshape([batch * heads * rows, 1, seen])
        };
        let (weights, log_sum_exp) = causal_softmax(logits)?;
        let weights = weights.reshape([batch, kv_heads, group * rows, seen]);
        // The counted queries are the last ones.
        let uncounted = (queries - counted).saturating_sub(start).min(rows);
        if let Some(sums) = sums.as_mut().filter(|_| uncounted < rows) {
            let normalised = weights.clone().reshape([batch, kv_heads, group, rows, seen]);
            let normalised = normalised.narrow(3, uncounted, rows - uncounted);
            let added = normalised.sum_dim(3).reshape([batch, kv_heads, group, seen]);
            let mut from = 0;
            for range in &ranges {
                let own = added.clone().narrow(3, from, range.len());
                let so_far = sums.clone().slice_dim(3, range.clone()) + own;
                *sums = sums
                    .clone()
                    .slice_assign([0..batch, 0..kv_heads, 0..group, range.clone()], so_far);
                from += range.len();
            }
        }
        // The weights of a row sum to 1, so the output is no larger than the largest value.
        let output = weights.cast(dtype).matmul(part(values));
        outputs.push(output.reshape([batch, heads, rows, head_dim]));
        if options.log_sum_exp {
            log_sums.push(log_sum_exp.reshape([batch, heads, rows]));
        }
    }
    Ok(PrefillOutput {
        output: Tensor::cat(outputs, 2),
        column_sums: sums.map(|sums| sums.reshape([batch, heads, tokens])),
        log_sum_exp: options.log_sum_exp.then(|| Tensor::cat(log_sums, 2)),
    })
}

/// A mask of the keys in `ranges` that each of `queries` does not see through a window,
/// `[rows, keys]`.
fn hidden(
    mask: &Mask,
    queries: Range<usize>,
    ranges: &[Range<usize>],
    like: &Tensor<4>,
) -> Tensor<2, Bool> {
    let device = like.device();
    let line = |range: &Range<usize>| {
        let range = range.start as i64..range.end as i64;
        Tensor::<1, Int>::arange(range, (&device, DType::I32))
    };
    let rows = queries.len();
    let keys = Tensor::cat(ranges.iter().map(line).collect(), 0).unsqueeze_dim::<2>(0);
    let seen = keys.dims()[1];
    let keys = keys.expand([rows, seen]);
    let own = line(&queries).unsqueeze_dim::<2>(1).expand([rows, seen]);
    let ahead = keys.clone().greater(own);
    let starts: Vec<i32> = queries.map(|query| mask.window.start(query) as i32).collect();
    let starts =
        Tensor::<2, Int>::from_data(TensorData::new(starts, [rows, 1]), (&device, DType::I32));
    let behind = keys.clone().lower(starts.expand([rows, seen]));
    let sinks = i32::try_from(mask.sinks).unwrap_or(i32::MAX);
    ahead.bool_or(behind.bool_and(keys.greater_equal_scalar(sinks)))
}
