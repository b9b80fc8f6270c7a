//! Causal attention of a whole prompt, in blocks of queries, with column sums as a by-product.

#[cfg(feature = "cuda")]
mod hopper;
#[cfg(feature = "cuda")]
pub(crate) mod launch;

use burn::tensor::{DType, Int, Tensor};

use crate::KernelError;
use crate::check::Check;

const OP: &str = "prefill_attention";

/// Bytes that one block's logits may take.
const BLOCK_BYTES: usize = 64 << 20;

/// What one call returns.
#[derive(Debug, Clone)]
pub struct PrefillOutput {
    /// `[B, Hq, T, D]`, in the query's dtype.
    pub output: Tensor<4>,
    /// `sum_i A[h, i, t]` over the queries that see token `t`, `[B, Hq, T]`, f32.
    pub column_sums: Option<Tensor<3>>,
}

/// Causal attention, `softmax(q kᵀ / sqrt(D)) v` over tokens up to the query's own.
///
/// Softmax subtracts the maximum and sums in f32. Blocks of queries keep the `T x T` matrix from
/// ever being whole.
///
/// # Shapes
/// `query` `[B, Hq, T, D]`, `keys` and `values` `[B, Hkv, T, D]`, with `Hq` a multiple of `Hkv`.
///
/// # Errors
/// [`KernelError`] where shapes do not fit.
pub fn prefill_attention(
    query: &Tensor<4>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    column_sums: bool,
) -> Result<PrefillOutput, KernelError> {
    let [batch, heads, tokens, head_dim] = query.dims();
    let kv_heads = keys.dims()[1];
    let check = Check::new(OP, query);
    check.shape("keys", keys, &[batch, kv_heads, tokens, head_dim])?;
    check.shape("values", values, &[batch, kv_heads, tokens, head_dim])?;
    if kv_heads == 0 || heads % kv_heads != 0 {
        return Err(KernelError::HeadGroups { op: OP, query_heads: heads, kv_heads });
    }
    #[cfg(feature = "cuda")]
    if !column_sums && matches!(head_dim, 64 | 128) && tokens > 0 && check.on_hopper() {
        let dtype = query.dtype();
        if dtype != DType::F32 && keys.dtype() == dtype && values.dtype() == dtype {
            return Ok(on_hopper(query, keys, values));
        }
    }
    let group = heads / kv_heads;
    let dtype = query.dtype();
    let device = query.device();
    let scale = 1.0 / (head_dim as f64).sqrt();
    let block = (BLOCK_BYTES / (4 * batch * heads * tokens.max(1))).clamp(16, 256);

    let query = query.clone().mul_scalar(scale);
    let query = query.reshape([batch, kv_heads, group, tokens, head_dim]);
    let keys_t = keys.clone().swap_dims(2, 3);
    let column = Tensor::<1, Int>::arange(0..tokens as i64, (&device, DType::I32));
    let mut outputs = Vec::new();
    let mut sums = column_sums
        .then(|| Tensor::<4>::zeros([batch, kv_heads, group, tokens], (&device, DType::F32)));
    for start in (0..tokens).step_by(block) {
        let rows = block.min(tokens - start);
        let seen = start + rows;
        let q = query.clone().narrow(3, start, rows);
        let q = q.reshape([batch, kv_heads, group * rows, head_dim]);
        let logits = q.matmul(keys_t.clone().narrow(3, 0, seen)).cast(DType::F32);

        // Only the block on the diagonal holds tokens that a query must not see.
        let own = column.clone().narrow(0, 0, rows);
        let hidden = own
            .clone()
            .unsqueeze_dim::<2>(0)
            .expand([rows, rows])
            .greater(own.unsqueeze_dim::<2>(1).expand([rows, rows]))
            .reshape([1, 1, 1, rows, rows])
            .expand([batch, kv_heads, group, rows, rows])
            .reshape([batch, kv_heads, group * rows, rows]);
        let diagonal = logits.clone().narrow(3, start, rows);
        let diagonal = diagonal.mask_fill(hidden, f32::NEG_INFINITY);
        let logits = if start == 0 {
            diagonal
        } else {
            logits.slice_assign([0..batch, 0..kv_heads, 0..group * rows, start..seen], diagonal)
        };

        let max = logits.clone().max_dim(3);
        let weights = (logits - max).exp();
        let total = weights.clone().sum_dim(3);
        if let Some(sums) = &mut sums {
            let normalised = weights.clone() / total.clone();
            let normalised = normalised.reshape([batch, kv_heads, group, rows, seen]);
            let added = normalised.sum_dim(3).reshape([batch, kv_heads, group, seen]);
            let so_far = sums.clone().narrow(3, 0, seen) + added;
            *sums = sums.clone().slice_assign([0..batch, 0..kv_heads, 0..group, 0..seen], so_far);
        }
        let output = weights.cast(dtype).matmul(values.clone().narrow(2, 0, seen));
        let output = output.cast(DType::F32) / total;
        outputs.push(output.cast(dtype).reshape([batch, heads, rows, head_dim]));
    }
    Ok(PrefillOutput {
        output: Tensor::cat(outputs, 2),
        column_sums: sums.map(|sums| sums.reshape([batch, heads, tokens])),
    })
}

#[cfg(feature = "cuda")]
fn on_hopper(query: &Tensor<4>, keys: &Tensor<4>, values: &Tensor<4>) -> PrefillOutput {
    let scale = 1.0 / (query.dims()[3] as f32).sqrt();
    let (output, _) = <burn::backend::Dispatch as crate::extension::HopperOps>::causal_attention(
        query.clone().into_dispatch(),
        keys.clone().into_dispatch(),
        values.clone().into_dispatch(),
        scale,
    );
    PrefillOutput { output: Tensor::from_dispatch(output), column_sums: None }
}
