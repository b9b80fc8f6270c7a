//! Launches `nearest_slots` on CubeCL devices.

use burn::backend::{DType, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::args::NearestSlotsArgs;
use super::kernel_args::{NearestLaunch, SlotListsLaunch};
use super::{NearestSlotsOptions, NearestSlotsStrategy, kernel, tensor_core};
use crate::backend::client::{elem_type, empty_like, grid};

/// Returns places and cosines.
pub(super) fn run(args: NearestSlotsArgs<CubeBackend>) -> (CubeTensor, CubeTensor) {
    let NearestSlotsArgs { keys, of, of_counts, among, among_counts, options } = args;
    let NearestSlotsOptions { earlier, strategy } = options;
    let [_, head_dim] = keys.shape().dims();
    let [rows, width] = of.shape().dims();
    let [_, others] = among.shape().dims();
    let places = empty_like(&keys, of.shape(), DType::I32);
    let cosines = empty_like(&keys, of.shape(), DType::F32);
    let keys = into_contiguous(keys);
    let client = keys.client.clone();
    let lists = SlotListsLaunch::new(
        into_contiguous(of).into_buffer_arg(),
        into_contiguous(of_counts).into_buffer_arg(),
        into_contiguous(among).into_buffer_arg(),
        into_contiguous(among_counts).into_buffer_arg(),
        rows,
        width,
        others,
    );
    let nearest =
        NearestLaunch::new(places.clone().into_buffer_arg(), cosines.clone().into_buffer_arg());
    let elem = elem_type(keys.dtype);
    // SAFETY: shapes were checked, and the kernels guard their accesses.
    unsafe {
        if strategy == NearestSlotsStrategy::TensorCore {
            let blueprint = tensor_core::Blueprint::new(head_dim, earlier);
            tensor_core::nearest_tiles_kernel::launch_unchecked(
                &client,
                grid(rows * width.div_ceil(blueprint.rows())),
                CubeDim::new_1d(tensor_core::UNITS as u32),
                tensor_core::LANES,
                keys.into_buffer_arg(),
                lists,
                nearest,
                blueprint,
                elem,
            );
        } else {
            kernel::nearest_slots_kernel::launch_unchecked(
                &client,
                grid(rows * width.div_ceil(kernel::KEYS_PER_BLOCK)),
                CubeDim::new_1d(kernel::UNITS as u32),
                keys.into_buffer_arg(),
                lists,
                nearest,
                head_dim,
                earlier,
                elem,
            );
        }
    }
    (places, cosines)
}
