//! Launches `update_sketch` on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::accumulate::{Blueprint, UNITS, accumulate_kernel};
use super::args::{SketchUpdateArgs, UpdatedSketch};
use super::blueprint::UpdateBlueprint;
use super::kernel;
use super::kernel_args::{
    ExactTokensLaunch, MovesLaunch, ScoredSlotsLaunch, StepLogitsLaunch, TokenScoresLaunch,
};
use crate::backend::client::{elem_type, empty_like, grid, planes_of};
use crate::components::pool::PoolLaunch;
use crate::sketch::count_sketch::kernel_args::SketchLaunch;

/// The most tokens of a range whose probabilities one cube adds by itself.
const FEW: usize = 8_192;
/// Tokens of a part, where several cubes share a range.
const PART: usize = 1_024;
/// Tokens that a unit reads at once: in a cube that shares a range with other cubes, and in a cube
/// that has all tokens of its range.
const AHEAD: usize = 4;
const AHEAD_ALONE: usize = 8;
/// The fewest units are two for each of the 64 vectors of the widest row; and the most units.
const LEAST_UNITS: usize = 128;
const MOST_UNITS: usize = 512;

/// Adds probabilities and moves tokens, in the tensors' own buffers.
pub(super) fn run(args: SketchUpdateArgs<CubeBackend>) -> UpdatedSketch<CubeBackend> {
    let pool = args.pool.packed();
    let mut sketch = args.sketch;
    let [slot_scores, token_scores, lengths, moved, offsets, newest] =
        [args.slot_scores, args.token_scores, args.lengths, args.moved, args.offsets, args.newest]
            .map(into_contiguous);
    sketch.keys = into_contiguous(sketch.keys);
    sketch.values = into_contiguous(sketch.values);
    let [heads, hashes] = [sketch.heads, sketch.hashes].map(into_contiguous);
    let client = pool.keys.client.clone();
    let [batch, kv_heads] = offsets.shape().dims();
    let total_kv_heads = batch * kv_heads;
    let [_, group] = args.token_logits.shape().dims();
    let [_, head_dim] = pool.keys.shape().dims();
    let longest = args.options.longest.max(1);
    // Where one cube takes all tokens in a few turns, the second kernel adds probabilities too.
    let accumulates = longest <= FEW;
    let part = if accumulates { longest } else { PART };
    let parts = longest.div_ceil(part);
    let [slots, _] = pool.keys.shape().dims();
    // Fewer units wait for each other less. Each unit has a few slots and tokens.
    let wanted = (slots / total_kv_heads.max(1) / 2).max(if accumulates { longest / 8 } else { 0 });
    let widest = (client.properties().hardware.max_units_per_cube as usize).min(MOST_UNITS);
    let units = wanted.next_power_of_two().clamp(LEAST_UNITS, widest.max(LEAST_UNITS));
    let by_token = args.slot_logits.as_ref().is_none();
    let blueprint = |units: usize, ahead: usize| Blueprint {
        ahead,
        group,
        by_token,
        units,
        planes: planes_of(&client, units),
    };
    let shape = Shape::from([total_kv_heads * parts]);
    let tops = empty_like(&pool.keys, shape.clone(), DType::F32);
    let tops_at = empty_like(&pool.keys, shape, DType::I32);
    let [token_logits, log_sum_exp] = [args.token_logits, args.log_sum_exp].map(into_contiguous);
    let slot_logits = args.slot_logits.or_stand_in(&token_logits);
    let slack = i32::try_from(args.options.slack).unwrap_or(i32::MAX).min(i32::MAX / 2);
    let arg = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
    let scored_slots = || {
        let positions = arg(&pool.positions);
        ScoredSlotsLaunch::new(arg(&slot_scores), positions, arg(&offsets), arg(&lengths))
    };
    let token_scores_of =
        || TokenScoresLaunch::new(arg(&token_scores), arg(&tops), arg(&tops_at), parts, part);
    let step_logits = || {
        StepLogitsLaunch::new(
            arg(&slot_logits),
            arg(&token_logits),
            arg(&log_sum_exp),
            arg(&newest),
            kv_heads,
            total_kv_heads,
        )
    };
    // SAFETY: shapes were checked; the kernels stay within the slots, entries and tokens that
    // ranges and heads name, given positions that the heads have room for.
    unsafe {
        if !accumulates {
            accumulate_kernel::launch_unchecked(
                &client,
                grid(total_kv_heads * parts),
                CubeDim::new_1d(UNITS as u32),
                scored_slots(),
                token_scores_of(),
                step_logits(),
                arg(&heads),
                blueprint(UNITS, AHEAD),
            );
        }
        kernel::update_kernel::launch_unchecked(
            &client,
            grid(total_kv_heads),
            CubeDim::new_1d(units as u32),
            SketchLaunch::new(arg(&sketch.keys), arg(&sketch.values), arg(&heads), arg(&hashes)),
            ExactTokensLaunch::new(
                PoolLaunch::new(arg(&pool.keys), arg(&pool.values)),
                scored_slots(),
            ),
            token_scores_of(),
            step_logits(),
            MovesLaunch::new(arg(&moved), slack, args.options.replace_rate),
            UpdateBlueprint {
                columns: head_dim / 4,
                accumulates,
                // CUDA's barrier also orders global memory for its cube.
                fenced: !client.properties().identity.fingerprint.starts_with("ptx"),
                scores: blueprint(units, AHEAD_ALONE),
                sketch: sketch.config,
            },
            elem_type(pool.keys.dtype),
        );
    }
    sketch.heads = heads;
    sketch.hashes = hashes;
    UpdatedSketch { sketch, pool, lengths, slot_scores, token_scores, moved }
}
