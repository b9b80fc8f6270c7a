//! Attention of a decode step over quantised slots, continued from the attention over other slots.
//!
//! The attention over the other slots is one output `o₀` and one log-sum-exp `l₀` a query head.
//! The quantised slots' logits are `x_j`, and their values `v_j`. The output is, with a maximum
//! taken out first,
//!
//! ```text
//! (exp(l₀) o₀ + Σ_j exp(x_j) v_j) / (exp(l₀) + Σ_j exp(x_j))
//! ```
//!
//! Codes are not turned into numbers first. For a channel's minimum `m_d`, step `s_d` and code
//! `c_jd`, a logit is `Σ_d q_d (m_d + s_d c_jd) = Σ_d q_d m_d + Σ_d (q_d s_d) c_jd`: a block's
//! queries times steps are made once for its 64 slots. Likewise a value's minimum and step are
//! multiplied into its softmax weight.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod kernel_args;
#[cfg(feature = "gpu")]
mod launch;
#[cfg(feature = "gpu")]
mod plain;
pub(crate) mod reference;
mod strategy;
#[cfg(feature = "gpu")]
mod tensor_core;

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

use super::layout::BLOCK;
use super::pool::QuantizedPool;
use crate::attention::continued::AttendedSlots;
use crate::backend::check::Check;
use crate::{KernelError, SlotRanges};
use args::QuantizedAttentionArgs;
use backend::QuantizedAttentionOps;
use strategy::QuantizedShape;
pub use strategy::QuantizedStrategy;

const OP: &str = "quantized_attention";
/// The most numbers of a group's queries: their products with steps and minima, of two blocks, fill
/// half of 32 KB of shared memory.
const MOST_QUERIES: usize = 1_024;
/// The most query heads of a group: their weights of a round, and what else there is of each, must
/// fit in 32 KB of shared memory.
const MOST_HEADS: usize = 16;
/// The largest head dim, since each of 128 units sums four channels.
const LARGEST_HEAD_DIM: usize = 512;

/// How [`quantized_attention`] attends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantizedAttentionOptions {
    /// The factor of logits; `None` means `1 / sqrt(D)`.
    pub scale: Option<f32>,
    /// The most slots that a range may have.
    pub longest: usize,
    /// The kernel.
    pub strategy: QuantizedStrategy,
}

impl QuantizedAttentionOptions {
    /// The usual factor and the kernel that is expected to be the fastest, for ranges of up to
    /// `longest` slots.
    pub fn new(longest: usize) -> Self {
        Self { scale: None, longest, strategy: QuantizedStrategy::Auto }
    }
}

/// Attends to quantised slots, beside the slots that were attended to before. Returns the output
/// and the log-sum-exp over both.
///
/// # Shapes
/// - `query`: `[B, Hq, D]`, f32, f16 or bf16
/// - `ranges`: offsets and lengths `[B, Hkv]`, 32-bit, in quantised slots; offsets are multiples of
///   [`QuantizedPool::BLOCK`]. They are on the device and are not checked.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit, and for a strategy that cannot run
/// the call.
pub fn quantized_attention(
    query: Tensor<3>,
    pool: &QuantizedPool,
    ranges: &SlotRanges,
    attended: AttendedSlots,
    options: QuantizedAttentionOptions,
) -> Result<AttendedSlots, KernelError> {
    let check = Check::new(OP, &query);
    check.supported()?;
    check.float("query", &query)?;
    check.filled("query", &query)?;
    let [batch, query_heads, head_dim] = query.dims();
    pool.check(&check, head_dim)?;
    let [_, kv_heads] = ranges.offsets.dims();
    check.shape("offsets", &ranges.offsets, &[batch, kv_heads])?;
    check.shape("lengths", &ranges.lengths, &[batch, kv_heads])?;
    check.int("offsets", &ranges.offsets)?;
    check.int("lengths", &ranges.lengths)?;
    attended.check(&check, query.dims(), query.dtype())?;
    if kv_heads == 0 || !query_heads.is_multiple_of(kv_heads) {
        return Err(check.unsupported(
            "query heads",
            query_heads,
            "a multiple of the key-value heads",
        ));
    }
    if query_heads / kv_heads * head_dim > MOST_QUERIES {
        let numbers = query_heads / kv_heads * head_dim;
        return Err(check.unsupported("numbers of a group's queries", numbers, "at most 1,024"));
    }
    if query_heads / kv_heads > MOST_HEADS {
        let heads = query_heads / kv_heads;
        return Err(check.unsupported("query heads of a group", heads, "at most 16"));
    }
    if head_dim > LARGEST_HEAD_DIM {
        return Err(check.unsupported("head dim", head_dim, "at most 512"));
    }
    let shape = QuantizedShape {
        group: query_heads / kv_heads,
        head_dim,
        bits: pool.bits,
        full: query.dtype() == DType::F32,
    };
    // Products are in bf16, whatever the query's dtype.
    let strategy = check.chosen(options.strategy, DType::BF16, &shape)?;
    let (output, log_sum_exp) =
        <Dispatch as QuantizedAttentionOps>::quantized_attention(QuantizedAttentionArgs {
            query: query.into_dispatch(),
            pool: pool.clone().into_tensors(),
            offsets: ranges.offsets.clone().into_dispatch(),
            lengths: ranges.lengths.clone().into_dispatch(),
            output: attended.output.into_dispatch(),
            log_sum_exp: attended.log_sum_exp.into_dispatch(),
            scale: options.scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt()),
            longest: options.longest.min(pool.value_scales.dims()[0]).next_multiple_of(BLOCK),
            strategy,
        });
    Ok(AttendedSlots {
        output: Tensor::from_dispatch(output),
        log_sum_exp: Tensor::from_dispatch(log_sum_exp),
    })
}
