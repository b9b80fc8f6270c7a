//! Launches `sketch_attention` on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use cubecl::prelude::*;

use super::args::{SketchAttended, SketchAttentionArgs};
use super::blueprint::Blueprint;
use super::kernel_args::{SketchOutputsLaunch, SketchedTokensLaunch, SplitRangesLaunch};
use super::plain::{self, sketch_attention_kernel};
use super::plan::{Kernel, Plan};
use super::shape::SketchShape;
use super::tensor_core::{joined_kernel, tile_kernel};
use crate::attention::decode::blueprint::KvSplit;
use crate::attention::decode::kernel_args::QueriesLaunch;
use crate::attention::decode::launch::{combine, head_outputs};
use crate::attention::decode::subgroup_softmax::ThreadGroup;
use crate::backend::client::{elem_type, empty_like, grid};
use crate::components::pool::PoolLaunch;
use crate::components::ptx::Halves;
use crate::sketch::count_sketch::kernel_args::SketchLaunch;

/// Runs the attention, and combines the parts of heads where no cluster has.
pub(super) fn run(args: SketchAttentionArgs<CubeBackend>) -> SketchAttended<CubeBackend> {
    let SketchAttentionArgs { query, keys, values, offsets, lengths, sketch, .. } = args;
    let [query, keys, values, offsets, lengths] =
        [query, keys, values, offsets, lengths].map(into_contiguous);
    let client = query.client.clone();
    let [batch, query_heads, head_dim] = query.shape().dims();
    let [slots, _] = keys.shape().dims();
    let [count] = args.scores.shape().dims();
    let total_kv_heads = offsets.shape().num_elements();
    let group = batch * query_heads / total_kv_heads;
    let shape = SketchShape {
        head_dim,
        size: query.dtype.size(),
        total_kv_heads,
        group,
        entries: sketch.most_entries,
        buckets: sketch.config.buckets,
        longest: args.longest + args.longest_tokens,
    };
    let Plan { kernel, splits, parts, staged } = args.strategy.plan(&query, &shape);
    let split = parts == KvSplit::Global;

    let floats = |shape: Shape| empty_like(&query, shape, DType::F32);
    let output = empty_like(&query, query.shape(), query.dtype);
    let log_sum_exp = floats(Shape::from([batch, query_heads]));
    let slot_logits = floats(Shape::from([slots, group]));
    let token_logits = floats(Shape::from([count, group]));
    let sums = if split { total_kv_heads * splits * group } else { 1 };
    let partial = floats(Shape::from([sums * head_dim]));
    let stats = floats(Shape::from([sums * 2]));
    // All kernels take these tensors.
    macro_rules! attend {
        ($kernel:path, $units:expr, [$($lanes:expr)?], $blueprint:expr) => {
            $kernel(
                &client,
                grid(total_kv_heads * splits),
                CubeDim::new_1d($units as u32),
                $($lanes,)?
                QueriesLaunch::new(query.clone().into_buffer_arg(), args.scale),
                PoolLaunch::new(keys.into_buffer_arg(), values.into_buffer_arg()),
                SplitRangesLaunch::new(
                    offsets.into_buffer_arg(),
                    lengths.into_buffer_arg(),
                    total_kv_heads,
                    splits,
                ),
                SketchedTokensLaunch::new(
                    SketchLaunch::new(
                        into_contiguous(sketch.keys).into_buffer_arg(),
                        into_contiguous(sketch.values).into_buffer_arg(),
                        into_contiguous(sketch.heads).into_buffer_arg(),
                        into_contiguous(sketch.hashes).into_buffer_arg(),
                    ),
                    into_contiguous(args.scores).into_buffer_arg(),
                    into_contiguous(args.newest).into_buffer_arg(),
                    total_kv_heads / batch,
                ),
                SketchOutputsLaunch::new(
                    head_outputs([&output, &log_sum_exp], [&partial, &stats]),
                    slot_logits.clone().into_buffer_arg(),
                    token_logits.clone().into_buffer_arg(),
                ),
                $blueprint,
                elem_type(query.dtype),
            )
        };
    }
    // SAFETY: shapes were checked; the kernels stay within the slots, entries and tokens that
    // ranges and heads name, given that no range has more entries than the sketch's `most_entries`.
    unsafe {
        match kernel {
            Kernel::Tiles { planes } => {
                let halves = if query.dtype == DType::BF16 { Halves::Bf16 } else { Halves::F16 };
                let sketch = sketch.config;
                let blueprint =
                    Blueprint { group, head_dim, planes, parts, staged, halves, sketch };
                let units = 32 * planes;
                match parts {
                    KvSplit::Cluster(_) => {
                        attend!(joined_kernel::launch_unchecked, units, [], blueprint)
                    }
                    KvSplit::None | KvSplit::Global => {
                        attend!(tile_kernel::launch_unchecked, units, [], blueprint)
                    }
                }
            }
            Kernel::Plain(plan) => {
                let blueprint = plain::Blueprint {
                    shape: ThreadGroup::new(&client, group, head_dim / plan.lanes, plan.team),
                    units: plan.units,
                    plane: plan.plane,
                    joined: plan.joined,
                    lanes: plan.lanes,
                    split,
                    staged,
                    sketch: sketch.config,
                };
                attend!(
                    sketch_attention_kernel::launch_unchecked,
                    plan.units,
                    [plan.lanes],
                    blueprint
                );
            }
        }
    }
    if split {
        combine([&partial, &stats], [&output, &log_sum_exp], total_kv_heads, splits, true);
    }
    SketchAttended { output, log_sum_exp, slot_logits, token_logits }
}
