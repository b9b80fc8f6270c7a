//! Sums the parts of heads that were split among cubes.

use cubecl::prelude::*;

use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::{divisor, larger, presence};

/// One cube a query head; `rows` units a column, each with every `rows`-th part.
///
/// # Shapes
/// In vectors of `N`: `partial` `[B, Hkv, splits, G, columns]`, `output` `[B, Hkv, G, columns]`;
/// `stats` `[B, Hkv, splits, G, 2]`, `log_sum_exp` `[B, Hkv, G]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn combine_kernel<F: Float, N: Size>(
    partial: &[Vector<f32, N>],
    stats: &[f32],
    output: &mut [Vector<F, N>],
    log_sum_exp: &mut [f32],
    heads: usize,
    splits: usize,
    #[comptime] group: usize,
    #[comptime] columns: usize,
    #[comptime] rows: usize,
    #[comptime] wants_log_sum_exp: bool,
    #[define(F)] _dtype: ElemType,
) {
    let head = CUBE_POS;
    if head >= heads {
        terminate!();
    }
    let kv_head = head / group;
    let g = head % group;
    let column = UNIT_POS as usize % columns;
    let row = UNIT_POS as usize / columns;

    let mut top = f32::new(LOWEST_LOGIT);
    let mut sum = 0.0f32;
    let mut total = Vector::<f32, N>::new(0.0f32);
    let mut split = row;
    while split < splits {
        let part = (kv_head * splits + split) * group + g;
        let max = larger(top, stats[part * 2]);
        let old = (top - max).exp();
        let new = (stats[part * 2] - max).exp();
        sum = sum * old + stats[part * 2 + 1] * new;
        total = total * Vector::new(old) + partial[part * columns + column] * Vector::new(new);
        top = max;
        split += rows;
    }

    let mut maxima = Shared::<[f32]>::new_slice(rows);
    let mut sums = Shared::<[f32]>::new_slice(rows);
    let mut totals = Shared::<[Vector<f32, N>]>::new_slice(comptime!(rows * columns));
    if column == 0 {
        maxima[row] = top;
        sums[row] = sum;
    }
    totals[row * columns + column] = total;
    sync_cube();
    if row == 0 {
        #[unroll]
        for other in 1..rows {
            let max = larger(top, maxima[other]);
            let old = (top - max).exp();
            let new = (maxima[other] - max).exp();
            sum = sum * old + sums[other] * new;
            total = total * Vector::new(old) + totals[other * columns + column] * Vector::new(new);
            top = max;
        }
        let result = total * Vector::new(presence(sum)) / Vector::new(divisor(sum));
        output[head * columns + column] = Vector::cast_from(result);
        if wants_log_sum_exp && column == 0 {
            log_sum_exp[head] = top + sum.ln();
        }
    }
}
