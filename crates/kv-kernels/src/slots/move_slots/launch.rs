//! Launches the ops that move slots on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::args::{Drops, Lists, Scalars};
use super::kernel::{
    self, CompactCube, CopiedRowsLaunch, CopiedWeights, DropBlueprint, DroppedSlotsLaunch,
    KeptListsLaunch,
};
use crate::backend::client::{elem_type, grid, is_cuda, vector_lanes};
use crate::slots::pool::SlotPools;

/// The most units of a compaction's cube; and the vectors that each unit reads at once, few enough
/// to stay in registers.
const COMPACT_UNITS: usize = 512;
const COMPACT_AHEAD: usize = 4;

/// The widest vector that serves rows of both pools.
fn lanes(from: &CubeTensor, to: &CubeTensor) -> usize {
    let width = from.shape()[1];
    vector_lanes(from, width, width).min(vector_lanes(to, width, width))
}

/// Copies rows of one pool into the buffers of another.
pub(super) fn copy(
    from: SlotPools<CubeBackend>,
    rows: CubeTensor,
    to: SlotPools<CubeBackend>,
    slots: CubeTensor,
) -> SlotPools<CubeBackend> {
    let (from, to) = (from.packed(), to.packed());
    let client = to.keys.client.clone();
    let lanes = lanes(&from.keys, &to.keys);
    let count = slots.shape().num_elements();
    let columns = from.keys.shape()[1] / lanes;
    let units = count * columns;
    let cube_dim = CubeDim::new(&client, units);
    let weights = match (from.weighted(), to.weighted()) {
        (_, false) => CopiedWeights::None,
        (true, true) => CopiedWeights::Copied,
        (false, true) => CopiedWeights::Fresh,
    };
    // SAFETY: shapes were checked. The kernel guards all accesses except those by the given rows.
    unsafe {
        kernel::copy_kernel::launch_unchecked(
            &client,
            calculate_cube_count_elemwise(&client, units, cube_dim),
            cube_dim,
            lanes,
            from.launched(),
            to.launched(),
            CopiedRowsLaunch::new(
                into_contiguous(rows).into_buffer_arg(),
                into_contiguous(slots).into_buffer_arg(),
                count,
            ),
            columns,
            weights,
            elem_type(from.keys.dtype),
            elem_type(to.keys.dtype),
        );
    }
    to
}

/// Moves the kept slots of each range to its beginning, in the pools' own buffers.
pub(super) fn compact(
    pools: SlotPools<CubeBackend>,
    offsets: CubeTensor,
    lists: Lists<CubeBackend>,
) -> SlotPools<CubeBackend> {
    let pools = pools.packed();
    let client = pools.keys.client.clone();
    let lanes = lanes(&pools.keys, &pools.keys);
    let total_kv_heads = offsets.shape().num_elements();
    let cube = CompactCube {
        units: (client.properties().hardware.max_units_per_cube as usize).min(COMPACT_UNITS),
        ahead: COMPACT_AHEAD,
        fenced: !is_cuda(&client),
    };
    // SAFETY: shapes were checked. The kernel guards all accesses except those by the given
    // indices.
    unsafe {
        kernel::compact_kernel::launch_unchecked(
            &client,
            grid(2 * total_kv_heads),
            CubeDim::new_1d(cube.units as u32),
            lanes,
            pools.launched(),
            KeptListsLaunch::new(
                into_contiguous(offsets).into_buffer_arg(),
                into_contiguous(lists.kept).into_buffer_arg(),
                into_contiguous(lists.starts).into_buffer_arg(),
                into_contiguous(lists.counts).into_buffer_arg(),
                total_kv_heads,
                lists.most,
            ),
            pools.keys.shape()[1] / lanes,
            cube,
            pools.weighted(),
            elem_type(pools.keys.dtype),
        );
    }
    pools
}

/// Moves the last slot of each range into its victim's place, in the pools' own buffers: the
/// `whole` slot, after which the lengths are one less, or its scalars alone.
pub(super) fn drop(
    pools: SlotPools<CubeBackend>,
    scalars: Scalars<CubeBackend>,
    drops: Drops<CubeBackend>,
    whole: bool,
) -> (SlotPools<CubeBackend>, Scalars<CubeBackend>, CubeTensor) {
    let pools = pools.packed();
    let lengths = into_contiguous(drops.lengths);
    let client = pools.keys.client.clone();
    let lanes = lanes(&pools.keys, &pools.keys);
    let columns = pools.keys.shape()[1] / lanes;
    let total_kv_heads = drops.victims.shape().num_elements();
    let hardware = &client.properties().hardware;
    let plane = (hardware.plane_size_max as usize).max(1);
    let most = (hardware.max_units_per_cube as usize).min(1024);
    let units = columns.min(256).next_multiple_of(plane).min(most);
    let scalars = scalars.map(|scalars| {
        let scalars: Vec<_> = scalars.into_iter().map(into_contiguous).collect();
        // SAFETY: shapes were checked. The kernel guards all accesses except those by the given
        // slots.
        unsafe {
            kernel::drop_kernel::launch_unchecked(
                &client,
                grid(total_kv_heads),
                CubeDim::new_1d(units as u32),
                lanes,
                pools.launched(),
                scalars.iter().map(|pool| pool.clone().into_buffer_arg()).collect(),
                DroppedSlotsLaunch::new(
                    into_contiguous(drops.offsets).into_buffer_arg(),
                    lengths.clone().into_buffer_arg(),
                    into_contiguous(drops.victims).into_buffer_arg(),
                    into_contiguous(drops.goes).into_buffer_arg(),
                    total_kv_heads,
                ),
                columns,
                DropBlueprint { weighted: pools.weighted(), whole },
                elem_type(pools.keys.dtype),
            );
        }
        scalars
    });
    (pools, scalars, lengths)
}

/// Sets the number of every range's last slot, in pools of one number a slot.
pub(super) fn reset_last(
    pools: Scalars<CubeBackend>,
    initial: Vec<f32>,
    offsets: CubeTensor,
    lengths: CubeTensor,
) -> Scalars<CubeBackend> {
    let client = lengths.client.clone();
    let total_kv_heads = lengths.shape().num_elements();
    let cube_dim = CubeDim::new(&client, total_kv_heads);
    pools.map(|pools| {
        let pools: Vec<_> = pools.into_iter().map(into_contiguous).collect();
        kernel::reset_last_kernel::launch(
            &client,
            calculate_cube_count_elemwise(&client, total_kv_heads, cube_dim),
            cube_dim,
            pools.iter().map(|pool| pool.clone().into_buffer_arg()).collect(),
            initial.into_iter().collect(),
            into_contiguous(offsets).into_buffer_arg(),
            into_contiguous(lengths).into_buffer_arg(),
            total_kv_heads,
        );
        pools
    })
}
