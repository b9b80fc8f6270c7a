//! Launches `archive_slots` on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::args::ArchiveArgs;
use super::kernel::{Blueprint, SourceSlotsLaunch, UNITS, archive_kernel};
use crate::archive::layout::BLOCK;
use crate::backend::client::{elem_type, grid};

/// Copies into the pool's own buffers.
pub(super) fn run(
    args: ArchiveArgs<CubeBackend>,
) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
    let ArchiveArgs { mut pool, keys, values, from, to } = args;
    let [_, head_dim] = keys.shape().dims();
    let [lists, count] = from.shape().dims();
    let blocks = count / BLOCK;
    let client = keys.client.clone();
    let (dtype, size) = (elem_type(keys.dtype), keys.dtype.size());
    let [keys, values] = [keys, values].map(into_contiguous);
    pool.rows.tensor = into_contiguous(pool.rows.tensor);
    pool.signatures = into_contiguous(pool.signatures);
    pool.key_statistics = into_contiguous(pool.key_statistics);
    pool.value_means = into_contiguous(pool.value_means);
    // SAFETY: shapes were checked; slots and blocks are the caller's, within their pools.
    unsafe {
        archive_kernel::launch_unchecked(
            &client,
            grid(lists * blocks),
            CubeDim::new_1d(UNITS as u32),
            SourceSlotsLaunch::new(
                keys.clone().into_buffer_arg(),
                values.clone().into_buffer_arg(),
                keys.into_buffer_arg(),
                values.into_buffer_arg(),
                into_contiguous(from).into_buffer_arg(),
                into_contiguous(to).into_buffer_arg(),
                lists,
                blocks,
            ),
            pool.launched(),
            Blueprint { head_dim, size, keeps_slots: pool.keeps_slots },
            dtype,
        );
    }
    (pool.rows.tensor, pool.signatures, pool.key_statistics, pool.value_means)
}
