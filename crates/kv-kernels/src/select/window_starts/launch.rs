//! Launches `window_starts` on CubeCL devices.

use burn::backend::{DType, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::args::WindowStartsArgs;
use super::kernel::window_starts_kernel;
use crate::backend::client::empty_like;
use crate::components::pool::HeadRangesLaunch;

/// The first slot of each range within its sequence's window.
pub(super) fn run(args: WindowStartsArgs<CubeBackend>) -> CubeTensor {
    let WindowStartsArgs { positions, offsets, lengths, newest, share } = args;
    let total_kv_heads = offsets.shape().num_elements();
    let kv_heads = total_kv_heads / newest.shape().num_elements();
    let client = positions.client.clone();
    let starts = empty_like(&positions, offsets.shape(), DType::I32);
    let cube_dim = CubeDim::new(&client, total_kv_heads);
    window_starts_kernel::launch(
        &client,
        calculate_cube_count_elemwise(&client, total_kv_heads, cube_dim),
        cube_dim,
        into_contiguous(positions).into_buffer_arg(),
        HeadRangesLaunch::new(
            into_contiguous(offsets).into_buffer_arg(),
            into_contiguous(lengths).into_buffer_arg(),
            total_kv_heads,
        ),
        into_contiguous(newest).into_buffer_arg(),
        starts.clone().into_buffer_arg(),
        kv_heads,
        share.bits(),
    );
    starts
}
