//! SwiGLU, the gate of a Llama MLP: `silu(gate) * up`.

mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
#[cfg(feature = "flex")]
pub(crate) mod vectorised;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::KernelError;
use crate::backend::check::Check;
use backend::SwigluOps;

/// `silu(gate) * up`, in f32, where each row has its gates and then its ups.
///
/// # Shapes
/// `x` `[N, 2 I]`, gates first; returns `[N, I]`.
///
/// # Errors
/// [`KernelError`] where shape, dtype or device do not fit.
pub fn swiglu(x: Tensor<2>) -> Result<Tensor<2>, KernelError> {
    const OP: &str = "swiglu";
    let check = Check::new(OP, &x);
    check.supported()?;
    check.float("x", &x)?;
    check.filled("x", &x)?;
    let width = x.dims()[1];
    if !width.is_multiple_of(2) {
        return Err(KernelError::Unsupported {
            op: OP,
            argument: "columns",
            actual: width.to_string(),
            supported: "even numbers",
        });
    }
    Ok(Tensor::from_dispatch(<Dispatch as SwigluOps>::swiglu(x.into_dispatch())))
}
