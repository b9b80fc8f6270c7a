//! Reduces the parts of quantised slots and the attention so far to the output and the
//! log-sum-exp, one unit a number.

use cubecl::prelude::*;

use super::kernel_args::Parts;
use crate::components::softmax::{divisor, larger, weight_of};

/// The attention so far, and the attention over all slots.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Attended<F: Float> {
    /// `[B, Hq, D]`
    before: Box<[F]>,
    /// `[B, Hq]`
    log_sum_exp_before: Box<[f32]>,
    /// `[B, Hq, D]`
    output: Box<[F]>,
    /// `[B, Hq]`
    log_sum_exp: Box<[f32]>,
}

#[cube(launch_unchecked)]
pub(super) fn combine_kernel<F: Float>(
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
