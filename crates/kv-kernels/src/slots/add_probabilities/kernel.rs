//! Kernels that add attention probabilities to the sums of slots. `cubes` cubes share a range; each
//! takes every `cubes`-th block of slots.

use cubecl::prelude::*;

use super::GroupReduction;
use crate::components::pool::HeadRanges;
use crate::components::softmax::{larger, weight_of};

/// Units of a cube.
pub(crate) const UNITS: usize = 128;

/// Results of decode attention.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Attended {
    /// `[S, G]`
    logits: Box<[f32]>,
    /// `[B, Hkv, G]`
    log_sum_exp: Box<[f32]>,
}

/// The contributions of slots to outputs so far, and the values.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Contributions<V: Float> {
    /// `[S]`
    sums: Box<[f32]>,
    /// Norms of values, `[S]`. The norm of each range's last slot is missing.
    norms: Box<[f32]>,
    /// `[S, head_dim]`
    values: Box<[V]>,
}

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    pub(crate) reduction: GroupReduction,
}

/// Adds probabilities to `sums` `[S]`, with `cubes` cubes a range.
#[cube(launch_unchecked)]
pub(crate) fn add_probabilities_kernel(
    sums: &mut [f32],
    attended: &Attended,
    ranges: &HeadRanges,
    cubes: usize,
    #[comptime] blueprint: Blueprint,
) {
    let cube = CUBE_POS;
    if cube >= ranges.total_kv_heads * cubes {
        terminate!();
    }
    let kv_head = cube / cubes;
    let (start, length) = (ranges.offsets[kv_head] as usize, ranges.lengths[kv_head] as usize);
    let mut i = cube % cubes * UNITS + UNIT_POS as usize;
    while i < length {
        let slot = start + i;
        sums[slot] += probability_of(attended, slot, kv_head, blueprint);
        i += cubes * UNITS;
    }
}

/// Adds each probability times the norm of the slot's value, with `cubes` cubes a range.
#[cube(launch_unchecked)]
pub(crate) fn add_contributions_kernel<V: Float>(
    contributions: &mut Contributions<V>,
    attended: &Attended,
    ranges: &HeadRanges,
    cubes: usize,
    #[comptime] head_dim: usize,
    #[comptime] blueprint: Blueprint,
    #[define(V)] _dtype: ElemType,
) {
    let cube = CUBE_POS;
    if cube >= ranges.total_kv_heads * cubes {
        terminate!();
    }
    let kv_head = cube / cubes;
    let (start, length) = (ranges.offsets[kv_head] as usize, ranges.lengths[kv_head] as usize);
    let mut i = cube % cubes * UNITS + UNIT_POS as usize;
    while i < length {
        let slot = start + i;
        // One unit of a range computes the norm of the last slot. It reads a whole value, while all
        // other units finish.
        if i + 1 == length {
            let mut norm = 0.0f32;
            for column in 0..head_dim {
                norm += f32::cast_from(contributions.values[slot * head_dim + column]).abs();
            }
            contributions.norms[slot] = norm;
        }
        let own = probability_of(attended, slot, kv_head, blueprint);
        contributions.sums[slot] += own * contributions.norms[slot];
        i += cubes * UNITS;
    }
}

/// The probabilities that a group's query heads give a slot, reduced to one number.
#[cube]
fn probability_of(
    attended: &Attended,
    slot: usize,
    kv_head: usize,
    #[comptime] blueprint: Blueprint,
) -> f32 {
    let (group, reduction) = comptime!((blueprint.group, blueprint.reduction));
    let mut reduced = 0.0f32;
    #[unroll]
    for g in 0..group {
        let log_sum_exp = attended.log_sum_exp[kv_head * group + g];
        let own = weight_of(attended.logits[slot * group + g], log_sum_exp);
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
