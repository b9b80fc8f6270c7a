//! Attention probabilities added to what slots have, straight from logits.

#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
pub(crate) mod launch;
pub(crate) mod reference;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::check::Check;
use crate::extension::AttentionOps;
use crate::{KernelError, SlotRanges};

const OP: &str = "add_probabilities";

/// How the probabilities that a group's query heads give a slot become one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GroupReduction {
    /// Their mean.
    #[default]
    Mean,
    /// Their maximum.
    Max,
    /// Their sum.
    Sum,
}

/// Adds every live slot's attention probability to its number, in place: `sum += reduce_g exp(l_g − L_g)`
/// of logits `l` and their log-sum-exp `L`.
///
/// # Shapes
/// `sums` `[S]`, `logits` `[S, G]` and `log_sum_exp` `[B, Hq]` as
/// [`crate::DecodeAttentionOptions`] has them, all f32; `ranges` `[B, Hkv]`.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; nothing is changed.
pub fn add_probabilities(
    sums: &mut Tensor<1>,
    logits: Tensor<2>,
    log_sum_exp: Tensor<2>,
    ranges: &SlotRanges,
    reduction: GroupReduction,
) -> Result<(), KernelError> {
    let check = Check::new(OP, sums);
    check.supported()?;
    check.filled("sums", sums)?;
    check.f32("sums", sums)?;
    let ([slots], [_, group]) = (sums.dims(), logits.dims());
    let [batch, kv_heads] = ranges.offsets.dims();
    check.ranges(ranges, batch, kv_heads)?;
    check.shape("logits", &logits, &[slots, group])?;
    check.filled("logits", &logits)?;
    check.f32("logits", &logits)?;
    check.shape("log_sum_exp", &log_sum_exp, &[batch, kv_heads * group])?;
    check.f32("log_sum_exp", &log_sum_exp)?;
    *sums = Tensor::from_dispatch(<Dispatch as AttentionOps>::add_probabilities(
        check.take(sums).into_dispatch(),
        logits.into_dispatch(),
        log_sum_exp.into_dispatch(),
        ranges.offsets.clone().into_dispatch(),
        ranges.lengths.clone().into_dispatch(),
        reduction,
    ));
    Ok(())
}
