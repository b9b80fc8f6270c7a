//! Launches `uniforms` on CubeCL devices.

use burn::backend::{DType, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::kernel::uniforms_kernel;
use crate::backend::client::empty_like;

/// A number for each seed and draw.
pub(super) fn run(seeds: CubeTensor, draws: CubeTensor) -> CubeTensor {
    let count = draws.shape().num_elements();
    let output = empty_like(&draws, draws.shape(), DType::F32);
    let client = draws.client.clone();
    let cube_dim = CubeDim::new(&client, count);
    uniforms_kernel::launch(
        &client,
        calculate_cube_count_elemwise(&client, count, cube_dim),
        cube_dim,
        into_contiguous(seeds).into_buffer_arg(),
        into_contiguous(draws).into_buffer_arg(),
        output.clone().into_buffer_arg(),
        count,
    );
    output
}
