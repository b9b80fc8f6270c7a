//! Launches `range_slots` on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::kernel::range_slots_kernel;
use crate::backend::client::empty_like;

/// The first `width` slots of every range.
pub(super) fn run(offsets: CubeTensor, width: usize) -> CubeTensor {
    let rows = offsets.shape().num_elements();
    let client = offsets.client.clone();
    let slots = empty_like(&offsets, Shape::from([rows, width]), DType::I32);
    let cube_dim = CubeDim::new(&client, rows * width);
    range_slots_kernel::launch(
        &client,
        calculate_cube_count_elemwise(&client, rows * width, cube_dim),
        cube_dim,
        into_contiguous(offsets).into_buffer_arg(),
        slots.clone().into_buffer_arg(),
        width,
    );
    slots
}
