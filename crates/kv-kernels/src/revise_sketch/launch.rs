//! Launches on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use cubecl::prelude::*;

use super::{accumulate, kernel};
use crate::extension::{Revised, Revision};
use crate::gpu::{elem_type, empty_like, grid, packed, planes_of};

/// Adds up and moves, in the tensors' own buffers.
pub(crate) fn run(revision: Revision<CubeBackend>) -> Revised<CubeBackend> {
    let pool = packed(revision.pool);
    let mut sketch = revision.sketch;
    let [slot_scores, token_scores, lengths, moved, offsets, newest] = [
        revision.slot_scores,
        revision.token_scores,
        revision.lengths,
        revision.moved,
        revision.offsets,
        revision.newest,
    ]
    .map(into_contiguous);
    sketch.keys = into_contiguous(sketch.keys);
    sketch.values = into_contiguous(sketch.values);
    let [heads, hashes] = [sketch.heads, sketch.hashes].map(into_contiguous);
    let client = pool.keys.client.clone();
    let [batch, kv_heads] = offsets.shape().dims();
    let pairs = batch * kv_heads;
    let [_, group] = revision.token_logits.shape().dims();
    let [_, head_dim] = pool.keys.shape().dims();
    let parts = revision.options.longest.div_ceil(accumulate::PART).max(1);
    let shape = Shape::from([pairs * parts]);
    let tops = empty_like(&pool.keys, shape.clone(), DType::F32);
    let tops_at = empty_like(&pool.keys, shape, DType::I32);
    // SAFETY: shapes were checked; the kernels stay within what ranges and heads name, given positions
    // that the heads have room for.
    unsafe {
        accumulate::accumulate_kernel::launch_unchecked(
            &client,
            grid(pairs * parts),
            CubeDim::new_1d(accumulate::UNITS as u32),
            slot_scores.clone().into_buffer_arg(),
            token_scores.clone().into_buffer_arg(),
            into_contiguous(revision.slot_logits).into_buffer_arg(),
            into_contiguous(revision.token_logits).into_buffer_arg(),
            into_contiguous(revision.log_sum_exp).into_buffer_arg(),
            pool.positions.clone().into_buffer_arg(),
            offsets.clone().into_buffer_arg(),
            lengths.clone().into_buffer_arg(),
            heads.clone().into_buffer_arg(),
            newest.clone().into_buffer_arg(),
            tops.clone().into_buffer_arg(),
            tops_at.clone().into_buffer_arg(),
            pairs,
            kv_heads,
            parts,
            group,
            revision.by_token,
            planes_of(&client, accumulate::UNITS),
        );
        kernel::revise_kernel::launch_unchecked(
            &client,
            grid(pairs),
            CubeDim::new_1d(kernel::UNITS as u32),
            sketch.keys.clone().into_buffer_arg(),
            sketch.values.clone().into_buffer_arg(),
            pool.keys.clone().into_buffer_arg(),
            pool.values.clone().into_buffer_arg(),
            pool.positions.clone().into_buffer_arg(),
            slot_scores.clone().into_buffer_arg(),
            token_scores.clone().into_buffer_arg(),
            lengths.clone().into_buffer_arg(),
            moved.clone().into_buffer_arg(),
            tops.into_buffer_arg(),
            tops_at.into_buffer_arg(),
            offsets.into_buffer_arg(),
            heads.clone().into_buffer_arg(),
            hashes.clone().into_buffer_arg(),
            newest.into_buffer_arg(),
            pairs,
            kv_heads,
            parts,
            i32::try_from(revision.options.slack).unwrap_or(i32::MAX / 2),
            revision.options.replace_rate,
            head_dim / 4,
            planes_of(&client, kernel::UNITS),
            sketch.config,
            elem_type(pool.keys.dtype),
        );
    }
    sketch.heads = heads;
    sketch.hashes = hashes;
    Revised { sketch, pool, lengths, slot_scores, token_scores, moved }
}
