//! The log-sum-exp of each query over a range's visible slots, `ln Σ_i exp(s_i)`. Scores of a
//! group's query heads are comparable only as weights, `exp(s_i − log-sum-exp)`.

use cubecl::prelude::*;

use super::blueprint::Blueprint;
use super::visible_range::VisibleRange;
use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::{larger, weight_of};

/// The log-sum-exp of each query over the visible slots.
#[cube]
pub(super) fn log_sums(
    logits: &[f32],
    base: usize,
    stride: usize,
    visible: &VisibleRange,
    #[comptime] blueprint: Blueprint,
) -> Array<f32> {
    let (group, units) = comptime!((blueprint.group, blueprint.units));
    let most_planes = comptime!(blueprint.planes());
    let gap = visible.start - visible.sinks;
    let count = visible.length - gap;
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    let planes = (CUBE_DIM / PLANE_DIM) as usize;
    let mut parts = Shared::<[f32]>::new_slice(comptime!(most_planes * group));
    let mut sums = Array::<f32>::new(group);
    let mut tops = Array::<f32>::new(group);
    #[unroll]
    for g in 0..group {
        let mut top = f32::new(LOWEST_LOGIT);
        let mut i = UNIT_POS as usize;
        while i < count {
            let slot = select(i < visible.sinks, i, i + gap);
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
        let mut top = f32::new(LOWEST_LOGIT);
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
            let slot = select(i < visible.sinks, i, i + gap);
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

/// Online sums of exponentials: a largest exponent, and the sum of the exponentials relative to it.
#[derive(CubeType)]
pub(crate) struct Sums {
    pub(crate) tops: Array<f32>,
    pub(crate) totals: Array<f32>,
}

#[cube]
impl Sums {
    /// Sums over nothing.
    pub(crate) fn none(#[comptime] count: usize) -> Sums {
        let mut sums = Sums { tops: Array::new(count), totals: Array::new(count) };
        #[unroll]
        for i in 0..count {
            sums.tops[i] = f32::new(LOWEST_LOGIT);
            sums.totals[i] = 0.0f32;
        }
        sums
    }

    /// Adds the exponentials of `count` values from `first` on. Absent values are [`LOWEST_LOGIT`].
    pub(crate) fn add_all(
        &mut self,
        #[comptime] i: usize,
        values: &Array<f32>,
        #[comptime] first: usize,
        #[comptime] count: usize,
    ) {
        let mut most = self.tops[i];
        #[unroll]
        for v in 0..count {
            most = larger(most, values[first + v]);
        }
        let mut total = self.totals[i] * (self.tops[i] - most).exp();
        #[unroll]
        for v in 0..count {
            total += weight_of(values[first + v], most);
        }
        self.totals[i] = total;
        self.tops[i] = most;
    }

    /// Adds `total * exp(top)`.
    pub(crate) fn add(&mut self, #[comptime] i: usize, top: f32, total: f32) {
        let most = larger(self.tops[i], top);
        self.totals[i] = self.totals[i] * (self.tops[i] - most).exp() + total * (top - most).exp();
        self.tops[i] = most;
    }
}
