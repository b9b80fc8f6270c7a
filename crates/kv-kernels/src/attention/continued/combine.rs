//! Reduces parts and the attention so far to the output and the log-sum-exp, one unit a number.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use crate::backend::client::{elem_type, empty_like};
use crate::components::softmax::{divisor, larger, weight_of};

/// The parts' sums.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Parts {
    /// Weighted values, `[B * Hkv, splits, G, D]`.
    pub(crate) values: Box<[f32]>,
    /// Maxima and sums of weights, `[B * Hkv, splits, G, 2]`.
    pub(crate) stats: Box<[f32]>,
}

/// The buffers of [`Parts`], and how they are shared.
pub(crate) struct PartTensors {
    values: CubeTensor,
    stats: CubeTensor,
    splits: usize,
    group: usize,
}

/// The attention so far, and the attention over all slots.
#[derive(CubeType, CubeLaunch)]
struct Attended<F: Float> {
    /// `[B, Hq, D]`
    before: Box<[F]>,
    /// `[B, Hq]`
    log_sum_exp_before: Box<[f32]>,
    /// `[B, Hq, D]`
    output: Box<[F]>,
    /// `[B, Hq]`
    log_sum_exp: Box<[f32]>,
}

impl PartTensors {
    /// Buffers for `splits` parts of each of `kv_heads` head ranges, whose group has `group` query
    /// heads, on the device of `query`, `[B, Hq, D]`.
    pub(crate) fn empty(query: &CubeTensor, kv_heads: usize, splits: usize, group: usize) -> Self {
        let [_, _, head_dim] = query.shape().dims();
        let part = |width: usize| {
            empty_like(query, Shape::from([kv_heads * splits * group, width]), DType::F32)
        };
        Self { values: part(head_dim), stats: part(2), splits, group }
    }

    /// The buffers as a kernel's argument.
    pub(crate) fn launched(&self) -> PartsLaunch {
        PartsLaunch::new(
            self.values.clone().into_buffer_arg(),
            self.stats.clone().into_buffer_arg(),
        )
    }

    /// Combines the parts with the attention so far, an output `[B, Hq, D]` and a log-sum-exp
    /// `[B, Hq]`. Returns the two over all slots.
    pub(crate) fn combine(
        self,
        output_before: CubeTensor,
        log_sum_exp_before: CubeTensor,
    ) -> (CubeTensor, CubeTensor) {
        let client = output_before.client.clone();
        let [batch, query_heads, head_dim] = output_before.shape().dims();
        let numbers = batch * query_heads * head_dim;
        let cube_dim = CubeDim::new(&client, numbers);
        let dtype = output_before.dtype;
        let output = empty_like(&output_before, output_before.shape(), dtype);
        let log_sum_exp = empty_like(&output_before, Shape::from([batch, query_heads]), DType::F32);
        // SAFETY: the parts belong to a query of the output's shape.
        unsafe {
            combine_kernel::launch_unchecked(
                &client,
                calculate_cube_count_elemwise(&client, numbers, cube_dim),
                cube_dim,
                self.launched(),
                AttendedLaunch::new(
                    into_contiguous(output_before).into_buffer_arg(),
                    into_contiguous(log_sum_exp_before).into_buffer_arg(),
                    output.clone().into_buffer_arg(),
                    log_sum_exp.clone().into_buffer_arg(),
                ),
                self.splits,
                numbers,
                self.group,
                head_dim,
                elem_type(dtype),
            );
        }
        (output, log_sum_exp)
    }
}

#[cube(launch_unchecked)]
fn combine_kernel<F: Float>(
    parts: &Parts,
    attended: &mut Attended<F>,
    splits: usize,
    numbers: usize,
    #[comptime] group: usize,
    #[comptime] head_dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let i = ABSOLUTE_POS;
    if i >= numbers {
        terminate!();
    }
    let head = i / head_dim;
    let channel = i % head_dim;
    let kv_head = head / group;
    let g = head % group;
    let before = attended.log_sum_exp_before[head];
    let mut top = before;
    for split in 0..splits {
        top = larger(top, parts.stats[((kv_head * splits + split) * group + g) * 2]);
    }
    let mut sum = weight_of(before, top);
    let mut total = 0.0f32;
    if sum > 0.0f32 {
        total = f32::cast_from(attended.before[i]) * sum;
    }
    for split in 0..splits {
        let part = (kv_head * splits + split) * group + g;
        let weight = weight_of(parts.stats[part * 2], top);
        sum += parts.stats[part * 2 + 1] * weight;
        total += parts.values[part * head_dim + channel] * weight;
    }
    attended.output[i] = F::cast_from(total / divisor(sum));
    if channel == 0 {
        attended.log_sum_exp[head] = top + sum.ln();
    }
}
