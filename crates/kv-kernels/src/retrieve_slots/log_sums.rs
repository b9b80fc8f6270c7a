//! Normalisers of a range's queries.

use cubecl::prelude::*;

use super::kernel::Blueprint;
use super::sight::Sight;
use crate::decode_attention::shared::{LOWEST, larger};

/// The log-sum-exp of each query over the slots in sight.
#[cube]
pub(super) fn log_sums(
    logits: &[f32],
    base: usize,
    stride: usize,
    sight: &Sight,
    #[comptime] blueprint: Blueprint,
) -> Array<f32> {
    let (group, units) = comptime!((blueprint.group, blueprint.units));
    let most_planes = comptime!(blueprint.planes());
    let gap = sight.start - sight.sinks;
    let count = sight.length - gap;
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    let planes = (CUBE_DIM / PLANE_DIM) as usize;
    let mut parts = Shared::<[f32]>::new_slice(comptime!(most_planes * group));
    let mut sums = Array::<f32>::new(group);
    let mut tops = Array::<f32>::new(group);
    #[unroll]
    for g in 0..group {
        let mut top = f32::new(LOWEST);
        let mut i = UNIT_POS as usize;
        while i < count {
            let slot = select(i < sight.sinks, i, i + gap);
            top = larger(top, logits[base + g * stride + slot]);
            i += units;
        }
        top = plane_max(top);
        if UNIT_POS_PLANE == 0 {
            parts[g * most_planes + plane] = top;
        }
    }
    sync_cube();
    #[unroll]
    for g in 0..group {
        let mut top = f32::new(LOWEST);
        for other in 0..planes {
            top = larger(top, parts[g * most_planes + other]);
        }
        tops[g] = top;
    }
    sync_cube();
    #[unroll]
    for g in 0..group {
        let mut sum = 0.0f32;
        let mut i = UNIT_POS as usize;
        while i < count {
            let slot = select(i < sight.sinks, i, i + gap);
            sum += (logits[base + g * stride + slot] - tops[g]).exp();
            i += units;
        }
        sum = plane_sum(sum);
        if UNIT_POS_PLANE == 0 {
            parts[g * most_planes + plane] = sum;
        }
    }
    sync_cube();
    #[unroll]
    for g in 0..group {
        let mut sum = 0.0f32;
        for other in 0..planes {
            sum += parts[g * most_planes + other];
        }
        sums[g] = tops[g] + sum.ln();
    }
    sync_cube();
    sums
}
