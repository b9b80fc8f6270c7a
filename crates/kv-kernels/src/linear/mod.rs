//! Products of a few rows with a weight matrix kept `[out, in]`: what a decode step consists of.

#[cfg(feature = "cuda")]
mod hopper;
#[cfg(feature = "gpu")]
pub(crate) mod launch;
pub(crate) mod reference;
#[cfg(feature = "gpu")]
mod skinny;

use burn::backend::Dispatch;
#[cfg(feature = "cuda")]
use burn::tensor::DType;
use burn::tensor::Tensor;

use crate::KernelError;
use crate::check::Check;
use crate::extension::SlotOps;

const OP: &str = "linear";

/// Rows up to which every row is computed by itself.
const SKINNY: usize = 32;

/// `y = x Wᵀ + b`.
///
/// On the CPU, up to 32 rows are summed row by row in one order, so that a row's result does not
/// depend on the others: a batch gives each sequence exactly what it gets alone.
///
/// # Shapes
/// `x` `[N, in]`, `weight` `[out, in]` of the same dtype, `bias` `[out]`; returns `[N, out]`.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn linear(
    x: Tensor<2>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Result<Tensor<2>, KernelError> {
    let [rows, inputs] = x.dims();
    let [outputs, _] = weight.dims();
    let check = Check::new(OP, &x);
    check.supported()?;
    check.float("x", &x)?;
    check.shape("weight", &weight, &[outputs, inputs])?;
    if weight.dtype() != x.dtype() {
        return Err(KernelError::Dtype {
            op: OP,
            argument: "weight",
            expected: "the dtype of x",
            actual: weight.dtype(),
        });
    }
    if let Some(bias) = &bias {
        check.shape("bias", bias, &[outputs])?;
    }
    let y = if rows <= SKINNY {
        let y = <Dispatch as SlotOps>::skinny_product(x.into_dispatch(), weight.into_dispatch());
        Tensor::from_dispatch(y)
    } else {
        wide(&check, x, weight)
    };
    Ok(match bias {
        Some(bias) => y + bias.unsqueeze_dim(0),
        None => y,
    })
}

/// Products of many rows.
fn wide(check: &Check, x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "cuda")]
    {
        let [outputs, inputs] = weight.dims();
        // Copies move pieces of 16 bytes, results are written in pairs.
        let fits = inputs.is_multiple_of(8) && outputs.is_multiple_of(2) && inputs >= 64;
        if x.dtype() != DType::F32 && fits && check.on_hopper() {
            let y = <Dispatch as crate::extension::HopperOps>::wide_product(
                x.into_dispatch(),
                weight.into_dispatch(),
            );
            return Tensor::from_dispatch(y);
        }
    }
    let _ = check;
    x.matmul(weight.transpose())
}
