//! Combines the partial sums of heads that several cubes share (split-KV), where no cluster has
//! reduced them. Part `p` leaves a maximum `m_p`, a sum of weights `l_p` and a weighted sum of
//! values `o_p`. With `m = max_p m_p`, the output is `Σ_p exp(m_p − m) o_p / Σ_p exp(m_p − m) l_p`.

use cubecl::prelude::*;

use super::kernel_args::HeadOutputs;
use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::{divisor, larger, presence};

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    /// Query heads of a key-value head.
    pub(super) group: usize,
    /// Vectors of a row.
    pub(super) columns: usize,
    /// Units that share a column.
    pub(super) rows: usize,
    /// Whether log-sum-exps are wanted.
    pub(super) log_sum_exp: bool,
}

/// Launches one cube for each of `heads` query heads. A column has `rows` units, each of which sums
/// every `rows`-th part.
#[cube(launch_unchecked)]
pub(super) fn combine_kernel<F: Float, N: Size>(
    outputs: &mut HeadOutputs<Vector<F, N>, Vector<f32, N>>,
    heads: usize,
    splits: usize,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let Blueprint { group, columns, rows, log_sum_exp } = blueprint;
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
        let max = larger(top, outputs.stats[part * 2]);
        let old = (top - max).exp();
        let new = (outputs.stats[part * 2] - max).exp();
        sum = sum * old + outputs.stats[part * 2 + 1] * new;
        total =
            total * Vector::new(old) + outputs.partial[part * columns + column] * Vector::new(new);
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
        outputs.output[head * columns + column] = Vector::cast_from(result);
        if log_sum_exp && column == 0 {
            outputs.log_sum_exp[head] = top + sum.ln();
        }
    }
}
