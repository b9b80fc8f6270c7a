//! Root-mean-square norm, `x / sqrt(mean(x²) + ε) · w`, alone or fused with the addition before it.

mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
#[cfg(feature = "flex")]
mod vectorised;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::KernelError;
use crate::backend::check::Check;
use crate::backend::optional::OptionalFloat;
use backend::RmsNormOps;

/// Normalises rows: `x / sqrt(mean(x²) + ε)` in f32, rounded to the dtype, then times `weight`, as
/// in the models' own code.
///
/// # Shapes
/// `x` `[N, H]`, `weight` `[H]` of the same dtype; returns `[N, H]`.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, epsilon: f32) -> Result<Tensor<2>, KernelError> {
    check("rms_norm", &x, &weight)?;
    let (normed, _) = <Dispatch as RmsNormOps>::rms_norm(
        x.into_dispatch(),
        OptionalFloat::Absent,
        weight.into_dispatch(),
        epsilon,
    );
    Ok(Tensor::from_dispatch(normed))
}

/// `x + delta`, and its rows normalised as in [`rms_norm`], in one pass. Returns `(normalised,
/// sum)`.
///
/// # Shapes
/// `x` and `delta` `[N, H]`, `weight` `[H]`, all of one dtype. Both results are `[N, H]`.
///
/// # Errors
/// The errors of [`rms_norm`].
pub fn add_rms_norm(
    x: Tensor<2>,
    delta: Tensor<2>,
    weight: Tensor<1>,
    epsilon: f32,
) -> Result<(Tensor<2>, Tensor<2>), KernelError> {
    const OP: &str = "add_rms_norm";
    let check = check(OP, &x, &weight)?;
    check.shape("delta", &delta, &x.dims())?;
    check.same_dtype("delta", &delta, "the dtype of x", x.dtype())?;
    let (normed, sum) = <Dispatch as RmsNormOps>::rms_norm(
        x.into_dispatch(),
        Some(delta).into(),
        weight.into_dispatch(),
        epsilon,
    );
    Ok((Tensor::from_dispatch(normed), Tensor::from_dispatch(sum)))
}

fn check(op: &'static str, x: &Tensor<2>, weight: &Tensor<1>) -> Result<Check, KernelError> {
    let check = Check::new(op, x);
    check.supported()?;
    check.float("x", x)?;
    check.filled("x", x)?;
    check.shape("weight", weight, &[x.dims()[1]])?;
    check.same_dtype("weight", weight, "the dtype of x", x.dtype())?;
    Ok(check)
}
