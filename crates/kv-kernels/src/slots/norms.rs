//! L1 norms of value rows, and their logarithms.

use burn::tensor::{DType, Tensor};

use crate::LOWEST_NORM;

/// Rows whose norms are computed at a time: an f32 copy of a whole pool would be too large.
const ROWS: usize = 1 << 19;

/// `‖v‖₁` of every row of `values` `[N, D]`, `[N]`, f32.
pub fn value_norms(values: Tensor<2>) -> Tensor<1> {
    let of = |rows: Tensor<2>| rows.cast(DType::F32).abs().sum_dim(1).squeeze_dim(1);
    if values.dims()[0] <= ROWS {
        return of(values);
    }
    Tensor::cat(values.split(ROWS, 0).into_iter().map(of).collect(), 0)
}

/// `ln ‖v‖₁` of every row of `values` `[N, D]`, `[N]`, f32; [`LOWEST_NORM`] for rows of zeros.
pub fn log_norms(values: Tensor<2>) -> Tensor<1> {
    let norms = value_norms(values);
    let zero = norms.clone().equal_scalar(0.0);
    norms.log().mask_fill(zero, LOWEST_NORM)
}

/// `ln ‖v‖₁` of a value.
pub(crate) fn log_norm(value: &[f32]) -> f32 {
    let norm: f32 = value.iter().map(|x| x.abs()).sum();
    // NaN is not 0: it stays NaN.
    if norm == 0.0 { LOWEST_NORM } else { norm.ln() }
}
