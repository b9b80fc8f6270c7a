//! The launch on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::plain::sketch_attention_kernel;
use super::plan::{Kernel, Plan, Sizes};
use super::tiles::{joined_kernel, tile_kernel};
use super::{plain, tiles};
use crate::decode_attention::blueprint::Parts;
use crate::decode_attention::launch::combine;
use crate::decode_attention::teams::TeamShape;
use crate::extension::{SketchAttended, SketchTokens};
use crate::gpu::{elem_type, empty_like, grid};
use crate::nvidia::Halves;

#[allow(clippy::too_many_arguments)]
pub(crate) fn run(
    query: CubeTensor,
    keys: CubeTensor,
    values: CubeTensor,
    offsets: CubeTensor,
    lengths: CubeTensor,
    tokens: SketchTokens<CubeBackend>,
    scale: f32,
    longest: usize,
) -> SketchAttended<CubeBackend> {
    let [query, keys, values, offsets, lengths] =
        [query, keys, values, offsets, lengths].map(into_contiguous);
    let client = query.client.clone();
    let [batch, query_heads, head_dim] = query.shape().dims();
    let [slots, _] = keys.shape().dims();
    let [count] = tokens.scores.shape().dims();
    let pairs = offsets.shape().num_elements();
    let group = batch * query_heads / pairs;
    let sketch = tokens.sketch;
    let sizes = Sizes {
        pairs,
        group,
        entries: sketch.most_entries,
        buckets: sketch.config.buckets,
        longest: longest + tokens.longest,
    };
    let Plan { kernel, splits, parts, staged } = Plan::new(&query, sizes);
    let split = parts == Parts::Written;

    let floats = |shape: Shape| empty_like(&query, shape, DType::F32);
    let output = empty_like(&query, query.shape(), query.dtype);
    let log_sum_exp = floats(Shape::from([batch, query_heads]));
    let slot_logits = floats(Shape::from([slots, group]));
    let token_logits = floats(Shape::from([count, group]));
    let sums = if split { pairs * splits * group } else { 1 };
    let partial = floats(Shape::from([sums * head_dim]));
    let stats = floats(Shape::from([sums * 2]));
    // The kernels take the same tensors.
    macro_rules! attend {
        ($kernel:path, $units:expr, [$($lanes:expr)?], $blueprint:expr) => {
            $kernel(
                &client,
                grid(pairs * splits),
                CubeDim::new_1d($units as u32),
                $($lanes,)?
                query.clone().into_buffer_arg(),
                keys.into_buffer_arg(),
                values.into_buffer_arg(),
                offsets.into_buffer_arg(),
                lengths.into_buffer_arg(),
                into_contiguous(sketch.keys).into_buffer_arg(),
                into_contiguous(sketch.values).into_buffer_arg(),
                into_contiguous(sketch.heads).into_buffer_arg(),
                into_contiguous(sketch.hashes).into_buffer_arg(),
                into_contiguous(tokens.scores).into_buffer_arg(),
                into_contiguous(tokens.newest).into_buffer_arg(),
                output.clone().into_buffer_arg(),
                log_sum_exp.clone().into_buffer_arg(),
                slot_logits.clone().into_buffer_arg(),
                token_logits.clone().into_buffer_arg(),
                partial.clone().into_buffer_arg(),
                stats.clone().into_buffer_arg(),
                pairs,
                pairs / batch,
                splits,
                scale,
                $blueprint,
                elem_type(query.dtype),
            )
        };
    }
    // SAFETY: shapes were checked; the kernels stay within the slots, entries and tokens that
    // ranges and heads name, of which no range has more entries than the sketch says.
    unsafe {
        match kernel {
            Kernel::Tiles { planes } => {
                let halves = if query.dtype == DType::BF16 { Halves::Bf16 } else { Halves::F16 };
                let sketch = sketch.config;
                let blueprint =
                    tiles::Blueprint { group, head_dim, planes, parts, staged, halves, sketch };
                let units = 32 * planes;
                match parts {
                    Parts::Joined(_) => {
                        attend!(joined_kernel::launch_unchecked, units, [], blueprint)
                    }
                    Parts::Whole | Parts::Written => {
                        attend!(tile_kernel::launch_unchecked, units, [], blueprint)
                    }
                }
            }
            Kernel::Plain(plan) => {
                let blueprint = plain::Blueprint {
                    shape: TeamShape::new(group, head_dim / plan.lanes, plan.team),
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
        combine([&partial, &stats], [&output, &log_sum_exp], pairs, splits, true);
    }
    SketchAttended { output, log_sum_exp, slot_logits, token_logits }
}
