//! Launches `archived_attention` on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::args::ArchivedAttentionArgs;
use super::kernel::{AHEAD, Blueprint, ChosenSlotsLaunch, UNITS, archived_attention_kernel};
use crate::archive::layout::BLOCK;
use crate::attention::continued::combine::PartTensors;
use crate::backend::client::{elem_type, grid, planes_of, processors};

/// Cubes of a processor, about.
const CUBES_EACH: usize = 8;

/// Attends to the parts, and combines them.
pub(super) fn run(args: ArchivedAttentionArgs<CubeBackend>) -> (CubeTensor, CubeTensor) {
    let query = into_contiguous(args.query);
    let [batch, query_heads, head_dim] = query.shape().dims();
    let [_, kv_heads] = args.offsets.shape().dims();
    let (ranges, group) = (batch * kv_heads, query_heads / kv_heads);
    let most = args.chosen.as_ref().map_or(0, |chosen| chosen.shape()[1]);
    let client = query.client.clone();
    let planes = planes_of(&client, UNITS);
    // A plane has a few slots at least: each part that is left to combine costs a read.
    let fill = processors(&client) * CUBES_EACH / ranges.max(1);
    let cubes = fill.clamp(1, (most + args.longest / BLOCK).div_ceil(planes * AHEAD));
    let parts = PartTensors::empty(&query, ranges, cubes * planes, group);
    let hardware = &client.properties().hardware;
    let blueprint = Blueprint {
        group,
        head_dim,
        dtype: query.dtype,
        plane: (hardware.plane_size_min as usize).max(1),
        planes,
        revives: most > 0,
    };
    let arg = |tensor: CubeTensor| into_contiguous(tensor).into_buffer_arg();
    let dtype = elem_type(query.dtype);
    let offsets = into_contiguous(args.offsets);
    // SAFETY: shapes were checked; ranges and slots are the caller's, within the pool.
    unsafe {
        archived_attention_kernel::launch_unchecked(
            &client,
            grid(ranges * cubes),
            CubeDim::new_1d(UNITS as u32),
            query.into_buffer_arg(),
            args.scale,
            ChosenSlotsLaunch::new(
                offsets.clone().into_buffer_arg(),
                arg(args.lengths),
                args.chosen.or_stand_in(&offsets).into_buffer_arg(),
                args.counts.or_stand_in(&offsets).into_buffer_arg(),
                most,
                ranges,
                cubes,
            ),
            args.pool.launched(),
            parts.launched(),
            blueprint,
            dtype,
        );
    }
    parts.combine(args.output, args.log_sum_exp)
}
