use std::ops::Range;

use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use kv_kernels::{KernelError, LinearOptions, RowNorm, linear};
use kv_parallel::Collective;

use crate::Result;

/// The matrix without padding: CUDA pads the rows of some matrices, which every step would have to
/// undo.
pub(super) fn packed(matrix: Tensor<2>) -> Tensor<2> {
    let shape = matrix.dims();
    matrix.reshape([shape[0] * shape[1]]).reshape(shape)
}

/// `y = x Wᵀ + b` with `W` kept `[out, in]`: matrix-vector products read it row by row.
#[derive(Module, Debug)]
pub(crate) struct Linear {
    weight: Param<Tensor<2>>,
    bias: Option<Param<Tensor<1>>>,
}

impl Linear {
    pub(crate) fn new(weight: Tensor<2>, bias: Option<Tensor<1>>) -> Self {
        let weight = Param::from_tensor(packed(weight));
        Self { weight, bias: bias.map(Param::from_tensor) }
    }

    /// `[N, in]` to `[N, out]`.
    ///
    /// # Errors
    /// [`KernelError`] for activations that are not of the weights' shape, dtype and device.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>, KernelError> {
        linear(x, self.weight.val(), self.options())
    }

    /// [`Self::forward`] of normalised rows.
    ///
    /// # Errors
    /// The errors of [`Self::forward`].
    pub(crate) fn forward_rmsnorm(
        &self,
        x: Tensor<2>,
        norm: RowNorm,
    ) -> Result<Tensor<2>, KernelError> {
        linear(x, self.weight.val(), LinearOptions { norm: Some(norm), ..self.options() })
    }

    /// [`Self::forward_rmsnorm`] for some rows of the weights only, `[N, rows]`.
    ///
    /// # Errors
    /// The errors of [`Self::forward`].
    pub(crate) fn rows_of_normed(
        &self,
        x: Tensor<2>,
        norm: RowNorm,
        rows: Range<usize>,
    ) -> Result<Tensor<2>, KernelError> {
        let bias = self.bias.as_ref().map(|bias| bias.val().slice_dim(0, rows.clone()));
        let weight = self.weight.val().slice_dim(0, rows);
        linear(x, weight, LinearOptions { norm: Some(norm), bias, ..Default::default() })
    }

    /// [`Self::forward_rmsnorm`], then `silu` of the outputs' first half times their second half,
    /// `[N, out / 2]`.
    ///
    /// # Errors
    /// The errors of [`Self::forward`].
    pub(crate) fn gated_of_normed(
        &self,
        x: Tensor<2>,
        norm: RowNorm,
    ) -> Result<Tensor<2>, KernelError> {
        let options = LinearOptions { norm: Some(norm), gated: true, ..self.options() };
        linear(x, self.weight.val(), options)
    }

    /// The sum of all ranks' [`Self::forward`], added to `residual` `[N, out]`. Each rank has some
    /// columns of the weights. The first rank alone has the bias and adds the residual, in its
    /// product, so that the sum is the only work beside the products.
    ///
    /// # Errors
    /// The errors of [`Self::forward`] and of the ranks' sum.
    pub(crate) fn sum_residual(
        &self,
        x: Tensor<2>,
        residual: Tensor<2>,
        ranks: &dyn Collective,
    ) -> Result<Tensor<2>> {
        let residual = ranks.shard().is_first().then_some(residual);
        let options = LinearOptions { residual, ..self.options() };
        Ok(ranks.linear_all_reduce(x, self.weight.val(), options)?)
    }

    /// Some rows of the weights and their biases in f32, for plain tensor operations: `[rows, in]`,
    /// `[rows]`.
    pub(super) fn rows(&self, rows: Range<usize>) -> (Tensor<2>, Option<Tensor<1>>) {
        let weight = self.weight.val().slice_dim(0, rows.clone()).cast(DType::F32);
        let bias = self.bias.as_ref().map(|bias| bias.val().slice_dim(0, rows).cast(DType::F32));
        (weight, bias)
    }

    /// The weights, to be replaced.
    pub(super) fn weight_mut(&mut self) -> &mut Param<Tensor<2>> {
        &mut self.weight
    }

    /// The outputs of a row, `out`.
    pub(super) fn width(&self) -> usize {
        self.weight.dims()[0]
    }

    fn options(&self) -> LinearOptions {
        LinearOptions { bias: self.bias.as_ref().map(Param::val), ..Default::default() }
    }
}
