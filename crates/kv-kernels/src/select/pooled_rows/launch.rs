//! Launches `pool_rows` on CubeCL devices.

use burn::backend::{DType, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::RowPool;
use super::kernel::pool_rows_kernel;
use crate::backend::client::empty_like;

/// Scores `[R, T]`, pooled over windows of `size` columns.
pub(super) fn run(scores: CubeTensor, size: usize, pool: RowPool) -> CubeTensor {
    let (client, shape) = (scores.client.clone(), scores.shape());
    let (columns, count) = (shape[1], shape.num_elements());
    let pooled = empty_like(&scores, shape, DType::F32);
    let cube_dim = CubeDim::new(&client, count);
    pool_rows_kernel::launch(
        &client,
        calculate_cube_count_elemwise(&client, count, cube_dim),
        cube_dim,
        into_contiguous(scores).into_buffer_arg(),
        pooled.clone().into_buffer_arg(),
        columns,
        size,
        pool == RowPool::Average,
    );
    pooled
}
