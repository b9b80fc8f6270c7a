//! The CubeCL kernel: cubes that share a range take every so many of its slots.

use cubecl::prelude::*;

use super::GroupReduction;
use crate::decode_attention::shared::{larger, weight_of};

/// Units of a cube.
pub(crate) const UNITS: usize = 128;

/// # Shapes
/// `logits` `[S, group]`, `log_sum_exp` `[pairs, group]`; `cubes` a range.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn add_probabilities_kernel(
    sums: &mut [f32],
    logits: &[f32],
    log_sum_exp: &[f32],
    offsets: &[i32],
    lengths: &[i32],
    pairs: usize,
    cubes: usize,
    #[comptime] group: usize,
    #[comptime] reduction: GroupReduction,
) {
    let cube = CUBE_POS;
    if cube >= pairs * cubes {
        terminate!();
    }
    let pair = cube / cubes;
    let (start, length) = (offsets[pair] as usize, lengths[pair] as usize);
    let mut i = cube % cubes * UNITS + UNIT_POS as usize;
    while i < length {
        let slot = start + i;
        let mut reduced = 0.0f32;
        #[unroll]
        for g in 0..group {
            let own = weight_of(logits[slot * group + g], log_sum_exp[pair * group + g]);
            if comptime!(reduction == GroupReduction::Max) {
                reduced = larger(reduced, own);
            } else {
                reduced += own;
            }
        }
        if comptime!(reduction == GroupReduction::Mean) {
            reduced /= f32::cast_from(group.runtime());
        }
        sums[slot] += reduced;
        i += cubes * UNITS;
    }
}
