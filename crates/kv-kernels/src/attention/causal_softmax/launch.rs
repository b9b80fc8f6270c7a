//! Launches `causal_softmax` on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::kernel::{LogitRowsLaunch, SoftmaxRowsLaunch, UNITS, causal_softmax_kernel};
use crate::backend::client::{empty_like, grid, vector_lanes};

/// Weights and log-sum-exps of logits `[R, N, T]`.
pub(super) fn run(logits: CubeTensor) -> (CubeTensor, CubeTensor) {
    let logits = into_contiguous(logits);
    let [sequences, queries, tokens] = logits.shape().dims();
    let rows = sequences * queries;
    let weights = empty_like(&logits, logits.shape(), DType::F32);
    let log_sums = empty_like(&logits, Shape::from([sequences, queries]), DType::F32);
    let lanes = vector_lanes(&logits, tokens, tokens).min(4);
    // SAFETY: shapes were checked, and the kernel guards its accesses.
    unsafe {
        causal_softmax_kernel::launch_unchecked(
            &logits.client.clone(),
            grid(rows),
            CubeDim::new_1d(UNITS as u32),
            lanes,
            LogitRowsLaunch::new(logits.into_buffer_arg(), rows, tokens / lanes, queries),
            SoftmaxRowsLaunch::new(
                weights.clone().into_buffer_arg(),
                log_sums.clone().into_buffer_arg(),
            ),
        );
    }
    (weights, log_sums)
}
