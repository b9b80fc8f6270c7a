//! Estimates of the attention that archived slots would get, by the bits that the device has of
//! their keys.
//!
//! A key is taken for `k̂ = μ ± σ` in each channel: the block's mean `μ` and spread `σ`, with the
//! sign of the slot's bit. Beside slots of log-sum-exp `l`, a slot of logit `x` has `exp(x − l)` of
//! the attention, as long as that is little. The slot's score is the logarithm of the sum over the
//! group's query heads,
//!
//! ```text
//! ln Σ_h exp(scale q_h · k̂ − l_h)
//! ```

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

use super::pool::ArchivePool;
use crate::backend::check::Check;
use crate::select::scored_rows::ScoredRows;
use crate::{KernelError, SlotRanges};
use args::SignatureScoresArgs;
use backend::SignatureOps;
use strategy::SignatureShape;
pub use strategy::SignatureStrategy;

const OP: &str = "signature_scores";
/// The most numbers of a group's queries, whose factors a cube has in shared memory.
pub(crate) const MOST_QUERIES: usize = 1_024;
/// The most query heads of a group, whose estimates a unit has in registers.
pub(crate) const MOST_HEADS: usize = 16;
/// The least log-sum-exp that counts: below it estimates would lose their last digits.
const LEAST_LOG_SUM: f32 = -1e4;

/// How [`signature_scores`] scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SignatureScoresOptions {
    /// The factor of logits; `None` means `1 / sqrt(D)`.
    pub scale: Option<f32>,
    /// The most slots that a range may have.
    pub longest: usize,
    /// How many slots of each range are wanted.
    pub wanted: usize,
    /// The kernel.
    pub strategy: SignatureStrategy,
}

/// Scores archived slots by their signatures.
///
/// # Shapes
/// - `query`: `[B, Hq, D]`, of the pool's dtype
/// - `ranges`: offsets and lengths `[B, Hkv]`, 32-bit, in archived slots; offsets are multiples of
///   [`ArchivePool::BLOCK`]. They are on the device and are not checked.
/// - `log_sum_exp`: `[B, Hq]`, f32, of the attention to other slots
///
/// In the result, a row is a range, `R` is `B * Hkv`, a column is a slot of the range, `T` is
/// `longest`, and `wanted` slots of each row are wanted.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit, and for a strategy that cannot run
/// the call.
pub fn signature_scores(
    query: &Tensor<3>,
    pool: &ArchivePool,
    ranges: &SlotRanges,
    log_sum_exp: &Tensor<2>,
    options: SignatureScoresOptions,
) -> Result<ScoredRows, KernelError> {
    let check = Check::new(OP, query);
    let SignatureScoresOptions { scale, longest, wanted, strategy } = options;
    check_call(&check, query, pool, ranges, log_sum_exp)?;
    if !pool.keeps_slots {
        return Err(check.unsupported("pool", "one that sums up", "pools that keep slots"));
    }
    if longest == 0 {
        return Err(check.unsupported("longest", longest, "at least 1 slot"));
    }
    if i32::try_from(wanted).is_err() {
        return Err(check.unsupported("wanted", wanted, "at most 2,147,483,647 slots"));
    }
    let ([_, query_heads, head_dim], [_, kv_heads]) = (query.dims(), ranges.offsets.dims());
    let full = query.dtype() == DType::F32;
    let shape = SignatureShape { group: query_heads / kv_heads, head_dim, full };
    let scored = <Dispatch as SignatureOps>::signature_scores(SignatureScoresArgs {
        query: query.clone().into_dispatch(),
        pool: pool.to_tensors(),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: ranges.lengths.clone().into_dispatch(),
        log_sum_exp: log_sum_exp.clone().into_dispatch(),
        scale: scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt()),
        columns: longest,
        wanted,
        strategy: check.chosen(strategy, DType::BF16, &shape)?,
    });
    Ok(scored.into())
}

/// Checks the arguments that both ops which read an archive have.
pub(crate) fn check_call(
    check: &Check,
    query: &Tensor<3>,
    pool: &ArchivePool,
    ranges: &SlotRanges,
    log_sum_exp: &Tensor<2>,
) -> Result<(), KernelError> {
    check.supported()?;
    check.float("query", query)?;
    check.filled("query", query)?;
    let [batch, query_heads, head_dim] = query.dims();
    pool.check(check, head_dim, query.dtype())?;
    let [_, kv_heads] = ranges.offsets.dims();
    check.ranges(ranges, batch, kv_heads)?;
    check.shape("log_sum_exp", log_sum_exp, &[batch, query_heads])?;
    check.f32("log_sum_exp", log_sum_exp)?;
    if kv_heads == 0 || !query_heads.is_multiple_of(kv_heads) {
        return Err(KernelError::HeadGroups { op: check.op(), query_heads, kv_heads });
    }
    let group = query_heads / kv_heads;
    if group > MOST_HEADS {
        return Err(check.unsupported("query heads of a group", group, "at most 16"));
    }
    if group * head_dim > MOST_QUERIES {
        let numbers = group * head_dim;
        return Err(check.unsupported("numbers of a group's queries", numbers, "at most 1,024"));
    }
    Ok(())
}
