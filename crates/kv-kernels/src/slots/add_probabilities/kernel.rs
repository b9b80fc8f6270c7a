//! The CubeCL kernel: cubes that share a range take every so many of its slots.

use cubecl::prelude::*;

use super::GroupReduction;
use crate::components::softmax::{larger, weight_of};

/// Units of a cube.
pub(crate) const UNITS: usize = 128;

/// Ranges of slots, `[total_kv_heads]` each.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Ranges {
    offsets: Box<[i32]>,
    lengths: Box<[i32]>,
}

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Query heads of a range.
    pub(crate) group: usize,
    pub(crate) reduction: GroupReduction,
}

/// # Shapes
/// `logits` `[S, group]`, `log_sum_exp` `[total_kv_heads, group]`; `cubes` a range.
#[cube(launch_unchecked)]
pub(crate) fn add_probabilities_kernel(
    sums: &mut [f32],
    logits: &[f32],
    log_sum_exp: &[f32],
    ranges: &Ranges,
    total_kv_heads: usize,
    cubes: usize,
    #[comptime] blueprint: Blueprint,
) {
    let cube = CUBE_POS;
    if cube >= total_kv_heads * cubes {
        terminate!();
    }
    let kv_head = cube / cubes;
    let (start, length) = (ranges.offsets[kv_head] as usize, ranges.lengths[kv_head] as usize);
    let mut i = cube % cubes * UNITS + UNIT_POS as usize;
    while i < length {
        let slot = start + i;
        sums[slot] += probability_of(logits, log_sum_exp, slot, kv_head, blueprint);
        i += cubes * UNITS;
    }
}

/// The same, each probability times the norm of the slot's value.
///
/// # Shapes
/// `norms` `[S]`, in which a range's last one is missing, and `values` `[S, head_dim]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn add_contributions_kernel<V: Float>(
    sums: &mut [f32],
    norms: &mut [f32],
    values: &[V],
    logits: &[f32],
    log_sum_exp: &[f32],
    ranges: &Ranges,
    total_kv_heads: usize,
    cubes: usize,
    #[comptime] head_dim: usize,
    #[comptime] blueprint: Blueprint,
    #[define(V)] _dtype: ElemType,
) {
    let cube = CUBE_POS;
    if cube >= total_kv_heads * cubes {
        terminate!();
    }
    let kv_head = cube / cubes;
    let (start, length) = (ranges.offsets[kv_head] as usize, ranges.lengths[kv_head] as usize);
    let mut i = cube % cubes * UNITS + UNIT_POS as usize;
    while i < length {
        let slot = start + i;
        // One unit of a range does so much more; all others are done while its reads are under way.
        if i + 1 == length {
            let mut norm = 0.0f32;
            for column in 0..head_dim {
                norm += f32::cast_from(values[slot * head_dim + column]).abs();
            }
            norms[slot] = norm;
        }
        let own = probability_of(logits, log_sum_exp, slot, kv_head, blueprint);
        sums[slot] += own * norms[slot];
        i += cubes * UNITS;
    }
}

/// What a group's query heads give a slot, as one number.
#[cube]
fn probability_of(
    logits: &[f32],
    log_sum_exp: &[f32],
    slot: usize,
    kv_head: usize,
    #[comptime] blueprint: Blueprint,
) -> f32 {
    let (group, reduction) = comptime!((blueprint.group, blueprint.reduction));
    let mut reduced = 0.0f32;
    #[unroll]
    for g in 0..group {
        let own = weight_of(logits[slot * group + g], log_sum_exp[kv_head * group + g]);
        if comptime!(reduction == GroupReduction::Max) {
            reduced = larger(reduced, own);
        } else {
            reduced += own;
        }
    }
    if comptime!(reduction == GroupReduction::Mean) {
        reduced /= f32::cast_from(group.runtime());
    }
    reduced
}
