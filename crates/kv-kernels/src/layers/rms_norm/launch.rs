//! Launches `rms_norm` and `add_rms_norm` on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::kernel::{NormOutputsLaunch, NormedRowsLaunch, UNITS, rms_norm_kernel};
use crate::backend::client::{elem_type, empty_like, grid, vector_lanes};
use crate::backend::optional::OptionalFloat;

/// Returns normalised rows, and the sums that were normalised.
pub(super) fn run(
    x: CubeTensor,
    delta: OptionalFloat<CubeBackend>,
    weight: CubeTensor,
    epsilon: f32,
) -> (CubeTensor, CubeTensor) {
    let x = into_contiguous(x);
    let adds = delta.as_ref().is_some();
    let [rows, width] = x.shape().dims();
    let normed = empty_like(&x, x.shape(), x.dtype);
    let sum = if adds { empty_like(&x, x.shape(), x.dtype) } else { x.clone() };
    let lanes = vector_lanes(&x, width, width);
    // SAFETY: shapes were checked, and the kernel guards its accesses.
    unsafe {
        rms_norm_kernel::launch_unchecked(
            &x.client.clone(),
            grid(rows),
            CubeDim::new_1d(UNITS as u32),
            lanes,
            NormedRowsLaunch::new(
                x.clone().into_buffer_arg(),
                delta.or_stand_in(&x).into_buffer_arg(),
                into_contiguous(weight).into_buffer_arg(),
                rows,
                width / lanes,
                epsilon,
            ),
            NormOutputsLaunch::new(normed.clone().into_buffer_arg(), sum.clone().into_buffer_arg()),
            adds,
            elem_type(x.dtype),
        );
    }
    (normed, sum)
}
