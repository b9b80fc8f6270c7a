//! Launches `merge_nearest` on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use cubecl::prelude::*;

use super::NearestConfig;
use super::args::{MergingPools, StepMerges};
use super::blueprint::Blueprint;
use super::kernel::{
    self, MergeRulesLaunch, MergingRangesLaunch, MergingStepLaunch, SlotNumbersLaunch,
};
use crate::backend::client::{elem_type, grid, planes_of, processors, vector_lanes, widest_cube};
use crate::components::pool::PoolLaunch;
use crate::slots::average_scores::kernel::ScoreWeightsLaunch;

/// Merges in the pools' own buffers.
pub(super) fn run(
    pools: MergingPools<CubeBackend>,
    merges: StepMerges<CubeBackend>,
    config: NearestConfig,
) -> MergingPools<CubeBackend> {
    let StepMerges { offsets, lengths, victims, goes, queries, logits, takes } = merges;
    let (keys, values) = (into_contiguous(pools.keys), into_contiguous(pools.values));
    let client = keys.client.clone();
    let [_, head_dim] = keys.shape().dims();
    let total_kv_heads = victims.shape().num_elements();
    let averaged = logits.as_ref().map_or(0, |logits| logits.shape()[1]);
    let numbers = queries.as_ref().map_or(0, |queries| queries.shape().num_elements());
    let (choosy, inherits) = (takes.as_ref().is_some(), pools.inherited.as_ref().is_some());
    let hardware = &client.properties().hardware;
    let plane = (hardware.plane_size_min as usize).max(1);
    let lanes = vector_lanes(&keys, head_dim, head_dim);
    let columns = head_dim / lanes;
    // One wide cube a processor; narrower cubes where processors have several.
    let (most, ahead) = if total_kv_heads <= processors(&client) { (512, 2) } else { (256, 4) };
    let units = widest_cube(&client).0.min(most);
    let planes = planes_of(&client, units);
    // With two vectors of a row, a unit needs fewer sums over units than with one.
    let team = columns.div_ceil(2).next_power_of_two().min(1 << plane.ilog2());
    // SAFETY: shapes were checked; the kernel stays within the ranges.
    unsafe {
        kernel::merge_nearest_kernel::launch_unchecked(
            &client,
            grid(total_kv_heads),
            CubeDim::new_1d(units as u32),
            lanes,
            PoolLaunch::new(keys.clone().into_buffer_arg(), values.clone().into_buffer_arg()),
            SlotNumbersLaunch::new(
                pools.log_weights.clone().into_buffer_arg(),
                pools.log_scores.clone().into_buffer_arg(),
                pools.log_samples.clone().into_buffer_arg(),
                pools.votes.clone().into_buffer_arg(),
                pools.votes_high.clone().into_buffer_arg(),
                pools.inherited.clone().or_new(&keys).into_buffer_arg(),
                takes.or_new(&keys).into_buffer_arg(),
            ),
            MergingRangesLaunch::new(
                into_contiguous(offsets).into_buffer_arg(),
                into_contiguous(lengths).into_buffer_arg(),
                into_contiguous(victims).into_buffer_arg(),
                into_contiguous(goes).into_buffer_arg(),
                total_kv_heads,
            ),
            MergingStepLaunch::new(
                queries.or_new(&keys).into_buffer_arg(),
                logits.or_new(&keys).into_buffer_arg(),
            ),
            MergeRulesLaunch::new(
                ScoreWeightsLaunch::new(
                    config.average.map_or(0.0, |weights| weights.new),
                    config.average.map_or(0.0, |weights| weights.old),
                ),
                config.threshold,
                config.log_epsilon,
                config.merge.guard.min(f32::MAX),
                config.merge.scale,
            ),
            Blueprint {
                columns,
                team,
                units,
                ahead,
                averages: 1024usize.div_ceil(units).min(4),
                planes,
                rule: config.merge.rule,
                literal: config.merge.guard == f32::INFINITY,
                group: numbers / (head_dim * total_kv_heads).max(1),
                averaged,
                choosy,
                inherits,
            },
            elem_type(keys.dtype),
        );
    }
    MergingPools { keys, values, ..pools }
}
