//! Launches `merge_slots` on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use cubecl::prelude::*;

use super::args::{MergeSlotsArgs, MergedPools};
use super::kernel::{self, KeptSlotsLaunch, KeyMovesLaunch, VictimsLaunch};
use crate::backend::client::{elem_type, empty_like, grid, vector_lanes};
use crate::components::pool::PoolLaunch;

/// Merges in the pools' own buffers.
pub(super) fn run(merges: MergeSlotsArgs<CubeBackend>) -> MergedPools<CubeBackend> {
    let config = merges.config;
    let (keys, values) = (into_contiguous(merges.keys), into_contiguous(merges.values));
    let [_, head_dim] = keys.shape().dims();
    let [rows, width] = merges.victims.shape().dims();
    let [_, n_kept] = merges.kept.shape().dims();
    let [.., numbers]: [usize; 3] = merges.kept_weights.shape().dims();
    let weights = empty_like(&keys, Shape::from([rows, n_kept, numbers]), DType::F32);
    let guarded = empty_like(&keys, Shape::from([rows, n_kept]), DType::I32);
    let lanes = vector_lanes(&keys, head_dim, head_dim).min(4);
    let columns = head_dim / lanes;
    let team = columns.next_power_of_two();
    // SAFETY: shapes were checked, and the kernel guards its accesses.
    unsafe {
        kernel::merge_slots_kernel::launch_unchecked(
            &keys.client.clone(),
            grid(rows * n_kept.div_ceil(kernel::UNITS / team)),
            CubeDim::new_1d(kernel::UNITS as u32),
            lanes,
            PoolLaunch::new(
                merges.from_keys.or_new(&keys).into_buffer_arg(),
                merges.from_values.or_new(&keys).into_buffer_arg(),
            ),
            PoolLaunch::new(keys.clone().into_buffer_arg(), values.clone().into_buffer_arg()),
            VictimsLaunch::new(
                into_contiguous(merges.victims).into_buffer_arg(),
                into_contiguous(merges.victim_counts).into_buffer_arg(),
                into_contiguous(merges.targets).into_buffer_arg(),
                into_contiguous(merges.victim_weights).into_buffer_arg(),
                width,
            ),
            KeptSlotsLaunch::new(
                into_contiguous(merges.kept).into_buffer_arg(),
                into_contiguous(merges.kept_counts).into_buffer_arg(),
                into_contiguous(merges.kept_weights).into_buffer_arg(),
                weights.clone().into_buffer_arg(),
                guarded.clone().into_buffer_arg(),
                rows,
                n_kept,
            ),
            KeyMovesLaunch::new(
                merges.queries.or_new(&keys).into_buffer_arg(),
                config.guard.min(f32::MAX),
                config.scale,
            ),
            kernel::Blueprint {
                columns,
                team,
                rule: config.rule,
                literal: config.guard == f32::INFINITY,
                queried: config.queried,
                within: config.within,
                numbers,
            },
            elem_type(keys.dtype),
        );
    }
    MergedPools { keys, values, weights, guarded }
}
