//! Adds attention probabilities to a running sum of each slot, `sum += reduce_g exp(l_g − L_g)`,
//! optionally times the norm of the slot's value. Probabilities are computed from logits on the
//! way, and never stored.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::backend::check::Check;
use crate::{KernelError, SlotRanges};
use args::ProbabilityArgs;
use backend::AddProbabilitiesOps;

const OP: &str = "add_probabilities";

/// How the probabilities that a group's query heads give a slot are reduced to one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GroupReduction {
    /// The mean over the query heads.
    #[default]
    Mean,
    /// The maximum over the query heads.
    Max,
    /// The sum over the query heads.
    Sum,
}

/// Adds each live slot's attention probability to its sum, in place: `sum += reduce_g exp(l_g −
/// L_g)`, with logits `l` and their log-sum-exp `L`.
///
/// # Shapes
/// `sums` `[S]`; `logits` `[S, G]` and `log_sum_exp` `[B, Hq]` as [`crate::AttentionOutput`] has
/// them; all f32. `ranges` `[B, Hkv]`.
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
    let check = checked(OP, sums, &logits, &log_sum_exp, ranges)?;
    let args = args(&check, sums, logits, log_sum_exp, ranges, reduction);
    *sums = Tensor::from_dispatch(<Dispatch as AddProbabilitiesOps>::add_probabilities(args));
    Ok(())
}

/// [`add_probabilities`] with each probability times the norm of the slot's value: `sum += ‖v‖₁
/// reduce_g exp(l_g − L_g)`. The norms are read, except the norm of each range's last slot, the
/// token that the step has appended: it is computed, and written to `norms`.
///
/// # Shapes
/// The shapes of [`add_probabilities`]; `norms` `[S]`, f32, and `values` `[S, D]`.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; nothing is changed.
pub fn add_contributions(
    sums: &mut Tensor<1>,
    norms: &mut Tensor<1>,
    values: &Tensor<2>,
    logits: Tensor<2>,
    log_sum_exp: Tensor<2>,
    ranges: &SlotRanges,
    reduction: GroupReduction,
) -> Result<(), KernelError> {
    const OP: &str = "add_contributions";
    let check = checked(OP, sums, &logits, &log_sum_exp, ranges)?;
    let ([slots], [_, head_dim]) = (sums.dims(), values.dims());
    check.shape("norms", norms, &[slots])?;
    check.f32("norms", norms)?;
    check.shape("values", values, &[slots, head_dim])?;
    check.float("values", values)?;
    let args = args(&check, sums, logits, log_sum_exp, ranges, reduction);
    let (written, found) = <Dispatch as AddProbabilitiesOps>::add_contributions(
        args,
        check.take(norms).into_dispatch(),
        values.clone().into_dispatch(),
    );
    (*sums, *norms) = (Tensor::from_dispatch(written), Tensor::from_dispatch(found));
    Ok(())
}

/// Checks the arguments that both ops share.
fn checked(
    op: &'static str,
    sums: &Tensor<1>,
    logits: &Tensor<2>,
    log_sum_exp: &Tensor<2>,
    ranges: &SlotRanges,
) -> Result<Check, KernelError> {
    let check = Check::new(op, sums);
    check.supported()?;
    check.filled("sums", sums)?;
    check.f32("sums", sums)?;
    let ([slots], [_, group]) = (sums.dims(), logits.dims());
    let [batch, kv_heads] = ranges.offsets.dims();
    check.ranges(ranges, batch, kv_heads)?;
    check.shape("logits", logits, &[slots, group])?;
    check.filled("logits", logits)?;
    check.f32("logits", logits)?;
    check.shape("log_sum_exp", log_sum_exp, &[batch, kv_heads * group])?;
    check.f32("log_sum_exp", log_sum_exp)?;
    Ok(check)
}

/// The checked tensors as the backends' arguments.
fn args(
    check: &Check,
    sums: &mut Tensor<1>,
    logits: Tensor<2>,
    log_sum_exp: Tensor<2>,
    ranges: &SlotRanges,
    reduction: GroupReduction,
) -> ProbabilityArgs<Dispatch> {
    ProbabilityArgs {
        sums: check.take(sums).into_dispatch(),
        logits: logits.into_dispatch(),
        log_sum_exp: log_sum_exp.into_dispatch(),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: ranges.lengths.clone().into_dispatch(),
        reduction,
    }
}
