//! Few rows times a weight matrix without matrix instructions, `y = x Wᵀ`, in any dtype on any
//! device. A team of units shares the sum of one output, or the sums of a gate and its gated
//! output.

use cubecl::prelude::*;

use super::args::EpilogueConfig;
use super::epilogue::{ProductOutputs, added_to, finish};

/// Units of a cube.
pub(super) const UNITS: usize = 128;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    /// Rows that a team takes at a time.
    pub(super) tile: usize,
    /// Units that share an output.
    pub(super) team: usize,
    pub(super) epilogue: EpilogueConfig,
}

/// # Shapes
/// `x` `[M, columns]` and `weight` `[outputs, columns]`, in vectors; `weight` has `2 outputs` rows
/// where gated.
#[cube(launch_unchecked)]
pub(super) fn plain_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    weight: &[Vector<E, N>],
    product: &mut ProductOutputs<E>,
    columns: usize,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    let Blueprint { tile, team, epilogue } = blueprint;
    let (rows, outputs) = (product.rows, product.outputs);
    let unit = UNIT_POS as usize;
    let lane = unit % team;
    let parts = epilogue.parts().comptime();
    let own = CUBE_POS * comptime!(UNITS / team) + unit / team;
    // Units after the last output take part in exchanges, but write nothing.
    let output = min(own, outputs - 1);
    let mut first = 0usize;
    while first < rows {
        let mut sums = Array::<Vector<f32, N>>::new(comptime!(parts * tile));
        #[unroll]
        for i in 0..comptime!(parts * tile) {
            sums[i] = Vector::new(0.0f32);
        }
        let mut at = lane;
        while at < columns {
            let mut w = Array::<Vector<f32, N>>::new(parts);
            #[unroll]
            for part in 0..parts {
                w[part] = Vector::cast_from(weight[(part * outputs + output) * columns + at]);
            }
            #[unroll]
            for row in 0..tile {
                let from = min(first + row, rows - 1) * columns + at;
                let wide = Vector::<f32, N>::cast_from(x[from]);
                #[unroll]
                for part in 0..parts {
                    sums[part * tile + row] += wide * w[part];
                }
            }
            at += team;
        }
        #[unroll]
        for row in 0..tile {
            let mut totals = Array::<f32>::new(2usize);
            #[unroll]
            for part in 0..parts {
                let mut total = 0.0f32;
                #[unroll]
                for i in 0..N::value() {
                    total += sums[part * tile + row].extract(i);
                }
                #[unroll]
                for level in 0..comptime!(team.ilog2()) {
                    total += plane_shuffle_xor(total, comptime!(1u32 << level));
                }
                totals[part] = total;
            }
            if lane == 0 && own < outputs && first + row < rows {
                let to = (first + row) * outputs + output;
                product.y[to] = finish::<E>(
                    &product.bias,
                    added_to::<E>(&product.residual, to, epilogue),
                    totals[0],
                    totals[comptime!(parts - 1)],
                    output,
                    outputs,
                    epilogue,
                );
            }
        }
        first += tile;
    }
}
