//! Launches `swiglu` on CubeCL devices.

use burn::backend::{Shape, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::kernel::swiglu_kernel;
use crate::backend::client::{elem_type, empty_like, vector_lanes};

/// Returns the gated rows.
pub(super) fn run(x: CubeTensor) -> CubeTensor {
    let x = into_contiguous(x);
    let [rows, width] = x.shape().dims();
    let y = empty_like(&x, Shape::from([rows, width / 2]), x.dtype);
    let lanes = vector_lanes(&x, width / 2, width / 2);
    let columns = width / 2 / lanes;
    let units = rows * columns;
    let cube_dim = CubeDim::new(&x.client, units);
    // SAFETY: the kernel guards its accesses.
    unsafe {
        swiglu_kernel::launch_unchecked(
            &x.client.clone(),
            calculate_cube_count_elemwise(&x.client, units, cube_dim),
            cube_dim,
            lanes,
            x.clone().into_buffer_arg(),
            y.clone().into_buffer_arg(),
            units,
            columns,
            elem_type(x.dtype),
        );
    }
    y
}
