//! The launch on CubeCL devices.

use burn::backend::{DType, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::kernel;
use crate::gpu::{elem_type, empty_like, grid};

/// Places and cosines.
pub(crate) fn run(
    keys: CubeTensor,
    of: CubeTensor,
    of_counts: CubeTensor,
    among: CubeTensor,
    among_counts: CubeTensor,
    earlier: bool,
) -> (CubeTensor, CubeTensor) {
    let [_, head_dim] = keys.shape().dims();
    let [rows, width] = of.shape().dims();
    let [_, others] = among.shape().dims();
    let places = empty_like(&keys, of.shape(), DType::I32);
    let cosines = empty_like(&keys, of.shape(), DType::F32);
    // SAFETY: shapes were checked, and the kernel guards its accesses.
    unsafe {
        kernel::nearest_slots_kernel::launch_unchecked(
            &keys.client.clone(),
            grid(rows * width.div_ceil(kernel::TILE)),
            CubeDim::new_1d(kernel::UNITS as u32),
            into_contiguous(keys.clone()).into_buffer_arg(),
            into_contiguous(of).into_buffer_arg(),
            into_contiguous(of_counts).into_buffer_arg(),
            into_contiguous(among).into_buffer_arg(),
            into_contiguous(among_counts).into_buffer_arg(),
            places.clone().into_buffer_arg(),
            cosines.clone().into_buffer_arg(),
            rows,
            width,
            others,
            head_dim,
            earlier,
            elem_type(keys.dtype),
        );
    }
    (places, cosines)
}
