//! Products of rows with a weight matrix kept `[out, in]`, with norm, bias, gate and residual. A
//! decode step consists of such products with few rows, which read every weight once.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod epilogue;
#[cfg(feature = "cuda")]
mod hopper_skinny;
#[cfg(feature = "cuda")]
mod hopper_split;
#[cfg(feature = "cuda")]
mod hopper_wide;
#[cfg(feature = "gpu")]
mod launch;
#[cfg(feature = "gpu")]
mod plain;
mod strategy;
#[cfg(feature = "gpu")]
mod tensor_core;
#[cfg(feature = "gpu")]
mod tiling;
#[cfg(feature = "flex")]
mod vectorised;

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

use crate::KernelError;
use crate::backend::check::Check;
#[cfg(feature = "cuda")]
use crate::peers::PeerArgs;
use crate::{rms_norm, swiglu};
use args::{Epilogue, EpilogueConfig};
#[cfg(feature = "cuda")]
use backend::HopperLinearOps;
use backend::LinearOps;
use strategy::LinearShape;

pub use strategy::LinearStrategy;

const OP: &str = "linear";

/// The most rows of a product in which each row is computed independently.
const SKINNY: usize = 32;

/// The steps of [`linear`] besides the product, in the order of the fields.
#[derive(Debug, Clone, Default)]
pub struct LinearOptions {
    /// The norm of the rows, if any.
    pub norm: Option<RowNorm>,
    /// A bias that is added to the sums, `[out]`.
    pub bias: Option<Tensor<1>>,
    /// Whether the outputs are a gate and a gated half, side by side. `silu` of the first half then
    /// multiplies the second (SwiGLU), and the result is `out / 2` wide.
    pub gated: bool,
    /// A residual that is added to the result, of the result's shape.
    pub residual: Option<Tensor<2>>,
    /// The kernel to run.
    pub strategy: LinearStrategy,
}

/// RMSNorm of the rows, as in [`rms_norm`]. Where a Hopper GPU fuses it into the product (f16 and
/// bf16, up to 32 rows), the products of rows and norm weights are rounded, and the sums are
/// divided by the root: in f16 such a product must not exceed 65,504.
#[derive(Debug, Clone)]
pub struct RowNorm {
    /// Norm weights, `[in]`, of the rows' dtype.
    pub weight: Tensor<1>,
    /// The number that is added to the mean square.
    pub epsilon: f32,
}

/// `y = x Wᵀ`, with the norm before it and the bias, gate and residual after it that `options`
/// name.
///
/// Up to 32 rows take one kernel. A norm takes another kernel, except on Hopper GPUs in f16 and
/// bf16, where the inputs are a multiple of 8 and at least 64. On the CPU and with matrix
/// instructions, up to 32 rows are summed in one order, so that a row's result does not depend on
/// the other rows: a batch gives each sequence exactly what it gets alone.
///
/// # Shapes
/// `x` `[N, in]`; `weight` `[out, in]`, bias and residual of the dtype of `x`. On a CPU, f16 and
/// bf16 weights also go with `x` in f32: each is cast to f32 before it is multiplied. Returns `[N,
/// out]`, or `[N, out / 2]` where gated.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit, and for a forced strategy that
/// cannot run the call.
pub fn linear(
    x: Tensor<2>,
    weight: Tensor<2>,
    options: LinearOptions,
) -> Result<Tensor<2>, KernelError> {
    let strategy = checked(&x, &weight, &options)?;
    #[cfg(feature = "cuda")]
    if strategy == LinearStrategy::HopperSkinny {
        return Ok(linear_over_peers(x, weight, options, PeerArgs::alone()));
    }
    let rows = x.dims()[0];
    let x = match &options.norm {
        Some(norm) => rms_norm(x, norm.weight.clone(), norm.epsilon)?,
        None => x,
    };
    #[cfg(feature = "cuda")]
    if strategy == LinearStrategy::HopperSplit {
        let y = <Dispatch as HopperLinearOps>::split_product(
            x.into_dispatch(),
            weight.into_dispatch(),
            options.epilogue(),
        );
        return Ok(Tensor::from_dispatch(y));
    }
    if strategy.is_skinny(rows) {
        let y = <Dispatch as LinearOps>::skinny_product(
            x.into_dispatch(),
            weight.into_dispatch(),
            options.epilogue(),
            strategy,
        );
        return Ok(Tensor::from_dispatch(y));
    }
    let mut y = wide(strategy, x, weight);
    if let Some(bias) = options.bias {
        y = y + bias.unsqueeze_dim(0);
    }
    if options.gated {
        y = swiglu(y)?;
    }
    Ok(match options.residual {
        Some(residual) => y + residual,
        None => y,
    })
}

/// Checks the arguments of [`linear`], and chooses its kernel.
fn checked(
    x: &Tensor<2>,
    weight: &Tensor<2>,
    options: &LinearOptions,
) -> Result<LinearStrategy, KernelError> {
    let [rows, inputs] = x.dims();
    let [outputs, _] = weight.dims();
    let dtype = x.dtype();
    let check = Check::new(OP, x);
    check.supported()?;
    check.float("x", x)?;
    check.shape("weight", weight, &[outputs, inputs])?;
    check.filled("weight", weight)?;
    if check.on_cpu() && dtype == DType::F32 {
        check.float("weight", weight)?;
    } else {
        check.same_dtype("weight", weight, "the dtype of x", dtype)?;
    }
    if let Some(bias) = &options.bias {
        check.shape("bias", bias, &[outputs])?;
        check.same_dtype("bias", bias, "the dtype of x", dtype)?;
    }
    if options.gated && !outputs.is_multiple_of(2) {
        return Err(KernelError::Unsupported {
            op: OP,
            argument: "gated outputs",
            actual: outputs.to_string(),
            supported: "even numbers",
        });
    }
    if let Some(residual) = &options.residual {
        let width = if options.gated { outputs / 2 } else { outputs };
        check.shape("residual", residual, &[rows, width])?;
        check.same_dtype("residual", residual, "the dtype of x", dtype)?;
    }
    if let Some(norm) = &options.norm {
        check.shape("norm", &norm.weight, &[inputs])?;
        check.same_dtype("norm", &norm.weight, "the dtype of x", dtype)?;
    }
    let shape = LinearShape { rows, inputs, outputs, halves: dtype != DType::F32 };
    check.chosen(options.strategy, dtype, &shape)
}

/// Whether the kernel of a product can add its results over peers.
///
/// # Errors
/// The errors of [`linear`].
#[cfg(feature = "cuda")]
pub(crate) fn sends_results(
    x: &Tensor<2>,
    weight: &Tensor<2>,
    options: &LinearOptions,
) -> Result<bool, KernelError> {
    Ok(checked(x, weight, options)? == LinearStrategy::HopperSkinny)
}

/// [`linear`] by [`LinearStrategy::HopperSkinny`], whose results are added over peers. The
/// arguments were checked.
#[cfg(feature = "cuda")]
pub(crate) fn linear_over_peers(
    x: Tensor<2>,
    weight: Tensor<2>,
    options: LinearOptions,
    peers: PeerArgs<Dispatch>,
) -> Tensor<2> {
    let (gain, epsilon) = options.norm.clone().map(|norm| (norm.weight, norm.epsilon)).unzip();
    let y = <Dispatch as HopperLinearOps>::streamed_product(
        x.into_dispatch(),
        weight.into_dispatch(),
        gain.into(),
        epsilon.unwrap_or_default(),
        options.epilogue(),
        peers,
    );
    Tensor::from_dispatch(y)
}

impl LinearOptions {
    /// The backends' arguments.
    fn epilogue(self) -> Epilogue<Dispatch> {
        let config = EpilogueConfig {
            biased: self.bias.is_some(),
            gated: self.gated,
            adds: self.residual.is_some(),
        };
        Epilogue { bias: self.bias.into(), residual: self.residual.into(), config }
    }
}

/// A product of many rows.
fn wide(strategy: LinearStrategy, x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "cuda")]
    if strategy == LinearStrategy::HopperWide {
        let y =
            <Dispatch as HopperLinearOps>::wide_product(x.into_dispatch(), weight.into_dispatch());
        return Tensor::from_dispatch(y);
    }
    debug_assert_ne!(strategy, LinearStrategy::HopperWide, "it is built with `cuda` alone");
    // Weights may be stored in fewer bits than the rows have.
    let dtype = x.dtype();
    x.matmul(weight.cast(dtype).transpose())
}
