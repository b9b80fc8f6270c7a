//! Weighted decode attention over slots: ragged lengths, grouped queries, optional log-weights.

#[cfg(feature = "gpu")]
pub(crate) mod kernel;
pub mod reference;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::check::Check;
use crate::extension::SlotOps;
use crate::{KernelError, SlotRanges};

const OP: &str = "decode_attention";

/// The largest number of query heads that may share a key-value head.
const MAX_GROUP: usize = 8;
/// The largest head dim.
const MAX_HEAD_DIM: usize = 256;

/// What to compute besides the output.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DecodeAttentionOptions {
    /// Logit scale; `None` means `1 / sqrt(D)`.
    pub scale: Option<f32>,
    /// Also return the log-sum-exp.
    pub log_sum_exp: bool,
    /// Also return every slot's attention probability.
    pub probabilities: bool,
}

/// What one call returns.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// `[B, Hq, D]`, in the query's dtype.
    pub output: Tensor<3>,
    /// `ln sum_i w_i exp(s_i)`, `[B, Hq]`, f32; −∞ where nothing was attended to.
    pub log_sum_exp: Option<Tensor<2>>,
    /// `[S, G]`, f32: column `g` of a slot's row is the probability that query head `h * G + g` of
    /// the slot's key-value head `h` gives to it. Rows outside the ranges hold 0.
    pub probabilities: Option<Tensor<2>>,
}

/// Comptime configuration and scale, as the backends receive it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DecodeConfig {
    pub(crate) scale: f32,
    pub(crate) features: Features,
}

/// What changes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Features {
    pub(crate) weighted: bool,
    pub(crate) log_sum_exp: bool,
    pub(crate) probabilities: bool,
}

/// Attention of one query per sequence over its slots,
/// `o = sum_i w_i exp(s_i) v_i / sum_i w_i exp(s_i)` with `s_i = scale * q . k_i`.
///
/// A running maximum is subtracted before every exponential and sums are kept in f32, whatever the
/// storage dtype. A range of length 0 gives zeros (and a log-sum-exp of −∞), as does one whose
/// weights are all 0.
///
/// # Shapes
/// - `query`: `[B, Hq, D]`, `keys` and `values`: `[S, D]`, all of one dtype (f32, f16 or bf16)
/// - `log_weights`: `[S]`, f32, `ln w_i` (−∞ for a weight of 0); `None` means all weights are 1
/// - `ranges`: `[B, Hkv]`, with `Hq` a multiple `G <= 8` of `Hkv`; slots of different pairs may
///   overlap (sequences may share a prefix)
///
/// # Errors
/// [`KernelError`] for shapes, dtypes, devices or sizes that do not fit; `D` must be a multiple of 4
/// of at most 256. The ranges' contents are on the device and are not checked: a range must end
/// within the pool.
pub fn decode_attention(
    query: Tensor<3>,
    keys: Tensor<2>,
    values: Tensor<2>,
    log_weights: Option<Tensor<1>>,
    ranges: &SlotRanges,
    options: DecodeAttentionOptions,
) -> Result<AttentionOutput, KernelError> {
    let [batch, query_heads, head_dim] = query.dims();
    let [slots, _] = keys.dims();
    let kv_heads = ranges.offsets.dims()[1];

    let check = Check::new(OP, &query);
    check.supported()?;
    check.float("query", &query)?;
    check.shape("keys", &keys, &[slots, head_dim])?;
    check.shape("values", &values, &[slots, head_dim])?;
    for (argument, tensor) in [("keys", &keys), ("values", &values)] {
        if tensor.dtype() != query.dtype() {
            return Err(KernelError::Dtype {
                op: OP,
                argument,
                expected: "the query's dtype",
                actual: tensor.dtype(),
            });
        }
    }
    check.ranges(ranges, batch, kv_heads)?;
    if kv_heads == 0 || query_heads % kv_heads != 0 {
        return Err(KernelError::HeadGroups { op: OP, query_heads, kv_heads });
    }
    let group = query_heads / kv_heads;
    if group == 0 || group > MAX_GROUP {
        return Err(unsupported("query heads per key-value head", group, "1 to 8"));
    }
    if head_dim == 0 || head_dim > MAX_HEAD_DIM || !head_dim.is_multiple_of(4) {
        return Err(unsupported("head dim", head_dim, "multiples of 4 up to 256"));
    }
    if batch == 0 || slots == 0 {
        return Err(unsupported("batch x slots", batch * slots, "at least 1"));
    }
    if let Some(weights) = &log_weights {
        check.shape("log_weights", weights, &[slots])?;
        check.f32("log_weights", weights)?;
    }

    let config = DecodeConfig {
        scale: options.scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt()),
        features: Features {
            weighted: log_weights.is_some(),
            log_sum_exp: options.log_sum_exp,
            probabilities: options.probabilities,
        },
    };
    // An extension takes no optional tensors: where no weights are read, any f32 tensor serves.
    let log_weights = log_weights
        .unwrap_or_else(|| Tensor::empty([1], (&query.device(), burn::tensor::DType::F32)));
    let (output, log_sum_exp, probabilities) = <Dispatch as SlotOps>::decode_attention(
        query.into_dispatch(),
        keys.into_dispatch(),
        values.into_dispatch(),
        log_weights.into_dispatch(),
        ranges.offsets.clone().into_dispatch(),
        ranges.lengths.clone().into_dispatch(),
        config,
    );
    Ok(AttentionOutput {
        output: Tensor::from_dispatch(output),
        log_sum_exp: options.log_sum_exp.then(|| Tensor::from_dispatch(log_sum_exp)),
        probabilities: options.probabilities.then(|| Tensor::from_dispatch(probabilities)),
    })
}

fn unsupported(argument: &'static str, actual: usize, supported: &'static str) -> KernelError {
    KernelError::Unsupported { op: OP, argument, actual: actual.to_string(), supported }
}
