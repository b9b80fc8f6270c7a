//! The kernel of `causal_softmax`, with one cube a row.

use cubecl::prelude::*;

use crate::components::sentinels::LOG_OF_ZERO;
use crate::components::softmax::{divisor, larger};

/// Units of a cube.
pub(crate) const UNITS: usize = 256;

/// Rows of logits.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct LogitRows<N: Size> {
    /// `[rows, columns]`, in vectors of `N`.
    logits: Box<[Vector<f32, N>]>,
    rows: usize,
    /// Vectors of a row.
    columns: usize,
    /// Rows that are queries of one sequence: the last of them sees all keys.
    queries: usize,
}

/// The results.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SoftmaxRows<N: Size> {
    /// `[rows, columns]`, in vectors of `N`.
    weights: Box<[Vector<f32, N>]>,
    /// `[rows]`
    log_sums: Box<[f32]>,
}

/// Normalises each row by one cube: its units keep maxima and sums online, and write the weights in
/// a second pass, when the row is in the cache.
#[cube(launch_unchecked)]
pub(crate) fn causal_softmax_kernel<N: Size>(given: &LogitRows<N>, outputs: &mut SoftmaxRows<N>) {
    let row = CUBE_POS;
    if row >= given.rows {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let (columns, queries) = (given.columns, given.queries);
    let lanes = N::value();
    let start = row * columns;
    let seen = columns * lanes - queries + row % queries + 1;
    let mut top = f32::new(LOG_OF_ZERO);
    let mut sum = 0.0f32;
    let mut i = unit;
    while i * lanes < seen {
        let own = given.logits[start + i];
        let mut higher = top;
        #[unroll]
        for lane in 0..lanes {
            if i * lanes + lane < seen {
                higher = larger(higher, own.extract(lane));
            }
        }
        sum *= (top - higher).exp();
        #[unroll]
        for lane in 0..lanes {
            if i * lanes + lane < seen {
                sum += (own.extract(lane) - higher).exp();
            }
        }
        top = higher;
        i += UNITS;
    }
    // Room for one number a plane, however narrow planes are.
    let mut tops = Shared::<[f32]>::new_slice(UNITS);
    let mut sums = Shared::<[f32]>::new_slice(UNITS);
    let plane_top = plane_max(top);
    let plane_sums = plane_sum(sum * (top - plane_top).exp());
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    if UNIT_POS_PLANE == 0 {
        tops[plane] = plane_top;
        sums[plane] = plane_sums;
    }
    sync_cube();
    let planes = (comptime!(UNITS as u32) / PLANE_DIM) as usize;
    let mut highest = f32::new(LOG_OF_ZERO);
    for other in 0..planes {
        highest = larger(highest, tops[other]);
    }
    let mut total = 0.0f32;
    for other in 0..planes {
        total += sums[other] * (tops[other] - highest).exp();
    }
    let by = divisor(total);
    let mut i = unit;
    while i < columns {
        let own = given.logits[start + i];
        let mut weights = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for lane in 0..lanes {
            if i * lanes + lane < seen {
                weights.insert(lane, (own.extract(lane) - highest).exp() / by);
            }
        }
        outputs.weights[start + i] = weights;
        i += UNITS;
    }
    if unit == 0 {
        outputs.log_sums[row] = highest + total.ln();
    }
}
