//! Launches the ops that write rows on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::kernel::{assign_kernel, scatter_rows_kernel};
use crate::backend::client::{elem_type, vector_lanes};

/// Writes into the pool's own buffer. The pool's clones see the rows, so that a cache never clones
/// a pool. CUDA pads the rows of some tensors, so the pool has a row stride of its own.
pub(super) fn scatter(pool: CubeTensor, slots: CubeTensor, rows: CubeTensor) -> CubeTensor {
    let rows = into_contiguous(rows);
    let count = slots.shape().num_elements();
    let width = rows.shape().num_elements() / count.max(1);
    let stride = pool.meta.strides()[0];
    let lanes = vector_lanes(&rows, width, stride);
    let columns = width / lanes;
    let units = count * columns;
    let cube_dim = CubeDim::new(&pool.client, units);
    scatter_rows_kernel::launch(
        &pool.client.clone(),
        calculate_cube_count_elemwise(&pool.client, units, cube_dim),
        cube_dim,
        lanes,
        pool.clone().into_buffer_arg(),
        into_contiguous(slots).into_buffer_arg(),
        rows.into_buffer_arg(),
        count,
        columns,
        stride / lanes,
        elem_type(pool.dtype),
    );
    pool
}

/// Copies one tensor into another tensor's buffer, whatever its strides: a contiguous copy of it
/// would be another buffer.
pub(super) fn assign(to: CubeTensor, from: CubeTensor) -> CubeTensor {
    let from = into_contiguous(from);
    let count = to.shape().num_elements();
    let lanes = if to.is_contiguous() { vector_lanes(&to, count, count) } else { 1 };
    let cube_dim = CubeDim::new(&to.client, count / lanes);
    assign_kernel::launch(
        &to.client.clone(),
        calculate_cube_count_elemwise(&to.client, count / lanes, cube_dim),
        cube_dim,
        lanes,
        to.clone().into_linear_view(),
        from.into_buffer_arg(),
        elem_type(to.dtype),
    );
    to
}
