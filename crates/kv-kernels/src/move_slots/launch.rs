//! Launches on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::kernel;
use crate::extension::{Lists, SlotPools};
use crate::gpu::{elem_type, grid, vector_lanes};

/// The widest vector that divides the rows of both pools.
fn lanes(from: &CubeTensor, to: &CubeTensor) -> usize {
    let width = from.shape()[1];
    let strides = [from.meta.strides()[0], to.meta.strides()[0]];
    let lanes = strides.map(|stride| vector_lanes(from, width, stride));
    lanes[0].min(lanes[1]).min(vector_lanes(to, width, strides[1]))
}

/// Rows of one pool copied into the other's own buffers.
pub(crate) fn copy(
    from: SlotPools<CubeBackend>,
    rows: CubeTensor,
    to: SlotPools<CubeBackend>,
    slots: CubeTensor,
) -> SlotPools<CubeBackend> {
    let client = to.keys.client.clone();
    // Values are read with the keys' strides.
    let (keys, values) = (into_contiguous(from.keys), into_contiguous(from.values));
    let lanes = lanes(&keys, &to.keys);
    let count = slots.shape().num_elements();
    let columns = keys.shape()[1] / lanes;
    let units = count * columns;
    let cube_dim = CubeDim::new(&client, units);
    // SAFETY: shapes were checked, and the kernel guards its accesses but for the given rows.
    unsafe {
        kernel::copy_kernel::launch_unchecked(
            &client,
            calculate_cube_count_elemwise(&client, units, cube_dim),
            cube_dim,
            lanes,
            keys.clone().into_buffer_arg(),
            values.into_buffer_arg(),
            into_contiguous(from.positions).into_buffer_arg(),
            into_contiguous(from.log_weights).into_buffer_arg(),
            into_contiguous(rows).into_buffer_arg(),
            into_contiguous(slots).into_buffer_arg(),
            to.keys.clone().into_buffer_arg(),
            to.values.clone().into_buffer_arg(),
            to.positions.clone().into_buffer_arg(),
            to.log_weights.clone().into_buffer_arg(),
            count,
            columns,
            keys.meta.strides()[0] / lanes,
            to.keys.meta.strides()[0] / lanes,
            from.weighted && to.weighted,
            to.weighted && !from.weighted,
            elem_type(keys.dtype),
            elem_type(to.keys.dtype),
        );
    }
    to
}

/// The kept slots of each range moved to its beginning, in the pools' own buffers.
pub(crate) fn compact(
    pools: SlotPools<CubeBackend>,
    offsets: CubeTensor,
    lists: Lists<CubeBackend>,
) -> SlotPools<CubeBackend> {
    let client = pools.keys.client.clone();
    let lanes = lanes(&pools.keys, &pools.keys);
    let pairs = offsets.shape().num_elements();
    // Cubes that read while others write: several on a processor.
    let units = (client.properties().hardware.max_units_per_cube as usize).min(512);
    let columns = pools.keys.shape()[1] / lanes;
    let shares = if columns.is_multiple_of(2) { 2 } else { 1 };
    // SAFETY: shapes were checked, and the kernel guards its accesses but for the given indices.
    unsafe {
        kernel::compact_kernel::launch_unchecked(
            &client,
            grid(2 * shares * pairs),
            CubeDim::new_1d(units as u32),
            lanes,
            pools.keys.clone().into_buffer_arg(),
            pools.values.clone().into_buffer_arg(),
            pools.positions.clone().into_buffer_arg(),
            pools.log_weights.clone().into_buffer_arg(),
            into_contiguous(offsets).into_buffer_arg(),
            into_contiguous(lists.kept).into_buffer_arg(),
            into_contiguous(lists.starts).into_buffer_arg(),
            into_contiguous(lists.counts).into_buffer_arg(),
            pairs,
            lists.most,
            columns,
            pools.keys.meta.strides()[0] / lanes,
            units,
            shares,
            pools.weighted,
            elem_type(pools.keys.dtype),
        );
    }
    pools
}
