//! Launches `argmin_slots` on CubeCL devices.

use burn::backend::{DType, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::Protection;
use super::args::ArgminSlotsArgs;
use super::kernel::{ProtectedTokensLaunch, argmin_slots_kernel};
use crate::backend::client::{empty_like, grid, widest_cube};
use crate::components::pool::HeadRangesLaunch;

/// The slot of each range's lowest score.
pub(super) fn run(args: ArgminSlotsArgs<CubeBackend>) -> CubeTensor {
    let ArgminSlotsArgs { scores, offsets, lengths, positions, newest, protection } = args;
    let offsets = into_contiguous(offsets);
    let total_kv_heads = offsets.shape().num_elements();
    let rows = newest.as_ref().map_or(1, |newest| newest.shape().num_elements());
    let protects = protection.is_some();
    let Protection { sinks, recents } = protection.unwrap_or(Protection { sinks: 0, recents: 0 });
    let output = empty_like(&scores, offsets.shape(), DType::I32);
    let units = widest_cube(&scores.client).0.min(512);
    argmin_slots_kernel::launch(
        &scores.client.clone(),
        grid(total_kv_heads),
        CubeDim::new_1d(units as u32),
        into_contiguous(scores).into_buffer_arg(),
        HeadRangesLaunch::new(
            offsets.clone().into_buffer_arg(),
            into_contiguous(lengths).into_buffer_arg(),
            total_kv_heads,
        ),
        ProtectedTokensLaunch::new(
            positions.or_stand_in(&offsets).into_buffer_arg(),
            newest.or_stand_in(&offsets).into_buffer_arg(),
            total_kv_heads / rows.max(1),
            sinks,
            recents,
        ),
        output.clone().into_buffer_arg(),
        units,
        protects,
    );
    output
}
