//! Launches the ops on heads on CubeCL devices.

use burn::backend::{Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::HeadConfig;
use super::args::{PlacementArgs, Projection, Written};
use super::kernel::{
    self, Blueprint, NewSlotsLaunch, NewTokensLaunch, ProjectedTokensLaunch, TokenHeadsLaunch,
    WriteBlueprint,
};
use crate::backend::client::{elem_type, empty_like, grid};
use crate::slots::pool::SlotPools;

/// Units of a cube that splits projections.
const UNITS: usize = 256;

/// Splits projections into queries `[B, Hq, T, D]`, and keys and values `[B, Hkv, T, D]`, of
/// `tokens` tokens a sequence.
pub(super) fn split(
    args: Projection<CubeBackend>,
    tokens: usize,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    let all = args.positions.shape().num_elements();
    let config = args.config;
    let HeadConfig { query_heads, kv_heads, head_dim, .. } = config;
    let blueprint = blueprint(&args, UNITS);
    let projected = into_contiguous(args.projected);
    let client = projected.client.clone();
    let out = |heads: usize| {
        // A kernel needs a buffer even for an output that it does not write.
        let shape =
            if heads == 0 { [1, 1, 1, head_dim] } else { [all / tokens, heads, tokens, head_dim] };
        empty_like(&projected, Shape::from(shape), projected.dtype)
    };
    let (query, key, value) = (out(query_heads), out(kv_heads), out(kv_heads));
    let rows = all * (query_heads + 2 * kv_heads);
    // SAFETY: shapes were checked, and the kernel guards its accesses.
    unsafe {
        kernel::split_kernel::launch_unchecked(
            &client,
            grid(rows.div_ceil(blueprint.rows())),
            CubeDim::new_1d(blueprint.units as u32),
            ProjectedTokensLaunch::new(
                projected.clone().into_buffer_arg(),
                into_contiguous(args.positions).into_buffer_arg(),
                args.cos.or_stand_in(&projected).into_buffer_arg(),
                args.sin.or_stand_in(&projected).into_buffer_arg(),
                args.query_norm.or_stand_in(&projected).into_buffer_arg(),
                args.key_norm.or_stand_in(&projected).into_buffer_arg(),
                config.epsilon,
            ),
            TokenHeadsLaunch::new(
                query.clone().into_buffer_arg(),
                key.clone().into_buffer_arg(),
                value.clone().into_buffer_arg(),
                all,
                tokens,
            ),
            blueprint,
            elem_type(projected.dtype),
        );
    }
    (query, key, value)
}

/// Writes new tokens into the pool's own buffers, unless these have gaps. Also returns the queries
/// `[B, Hq, D]`.
pub(super) fn write(
    args: Projection<CubeBackend>,
    pools: SlotPools<CubeBackend>,
    places: PlacementArgs<CubeBackend>,
) -> Written<CubeBackend> {
    let batch = args.positions.shape().num_elements();
    let config = args.config;
    let HeadConfig { query_heads, kv_heads, head_dim, .. } = config;
    let heads = query_heads / kv_heads + 2;
    let blueprint = blueprint(&args, heads * head_dim / 2);
    // CUDA pads the rows of some tensors.
    let (pools, lengths) = (pools.packed(), into_contiguous(places.lengths));
    let (offsets, log_norms) =
        (into_contiguous(places.offsets), places.log_norms.map(into_contiguous));
    let projected = into_contiguous(args.projected);
    let client = projected.client.clone();
    let shape = Shape::from([batch, query_heads, head_dim]);
    let query = empty_like(&projected, shape, projected.dtype);
    // SAFETY: shapes were checked, the kernel guards its accesses, and slots are the pool's own.
    unsafe {
        kernel::write_kernel::launch_unchecked(
            &client,
            grid(batch * kv_heads),
            CubeDim::new_1d(blueprint.units as u32),
            ProjectedTokensLaunch::new(
                projected.clone().into_buffer_arg(),
                into_contiguous(args.positions).into_buffer_arg(),
                args.cos.or_stand_in(&projected).into_buffer_arg(),
                args.sin.or_stand_in(&projected).into_buffer_arg(),
                args.query_norm.or_stand_in(&projected).into_buffer_arg(),
                args.key_norm.or_stand_in(&projected).into_buffer_arg(),
                config.epsilon,
            ),
            pools.launched(),
            NewSlotsLaunch::new(
                offsets.clone().into_buffer_arg(),
                lengths.clone().into_buffer_arg(),
                places.next.or_stand_in(&offsets).into_buffer_arg(),
                batch * kv_heads,
            ),
            NewTokensLaunch::new(
                query.clone().into_buffer_arg(),
                log_norms.clone().or_new(&projected).into_buffer_arg(),
            ),
            WriteBlueprint { heads: blueprint, place: places.place, weighted: pools.weighted() },
            elem_type(projected.dtype),
            elem_type(pools.keys.dtype),
        );
    }
    Written { query, pools, lengths, log_norms }
}

/// Comptime configuration of cubes of whole planes, about `units` wide and no wider than the device
/// allows.
fn blueprint(args: &Projection<CubeBackend>, units: usize) -> Blueprint {
    let config = args.config;
    let hardware = &args.projected.client.properties().hardware;
    let plane = (hardware.plane_size_max as usize).max(1);
    let most = (hardware.max_units_per_cube as usize).min(1024);
    let least = (config.head_dim / 2).max(1);
    let units = units.max(least).min(most).next_multiple_of(plane).min(most);
    Blueprint {
        query_heads: config.query_heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        rotates: args.cos.as_ref().is_some(),
        normalises: args.key_norm.as_ref().is_some(),
        units,
    }
}
