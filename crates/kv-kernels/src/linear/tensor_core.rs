//! Few rows times a weight matrix, with matrix instructions: f16 and bf16. A cube has 16 outputs,
//! its planes share the sum. Weights go from memory to registers in 16-byte pieces; every output is
//! summed in the same order however many rows there are.
//!
//! In a plane, lane `4 r + j` holds outputs `r` and `r + 8` of rows `2 j` and `2 j + 1`. Of a gated
//! product, `r` is a gate and `r + 8` what it gates.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::epilogue::finish;
use crate::extension::EpilogueConfig;

/// Outputs of a cube.
pub(super) const OUTPUTS: usize = 16;
const PLANE: usize = 32;
/// Pieces of 32 elements that a plane takes at a time.
const PIECES: usize = 2;

/// Planes of a cube for `tiles` of 8 rows: up to 8 rows, planes read ahead; above, where the rows
/// themselves take registers and time to read, more planes hide it.
pub(super) fn planes(tiles: usize) -> usize {
    if tiles == 1 { 8 } else { 16 }
}

/// # Shapes
/// In vectors of four pairs of elements: `x` `[M, K / 8]`, `weight` `[N, K / 8]`; `y` `[M, outputs]`,
/// where `N` is `outputs`, or twice as many where gated. `tiles` times 8 rows.
#[cube(launch_unchecked)]
pub(super) fn tensor_core_kernel<E: Float>(
    x: &[Vector<u32, Const<4>>],
    weight: &[Vector<u32, Const<4>>],
    bias: &[E],
    residual: &[E],
    y: &mut [E],
    rows: usize,
    outputs: usize,
    inputs: usize,
    #[comptime] tiles: usize,
    #[comptime] epilogue: EpilogueConfig,
    #[define(E)] _dtype: ElemType,
) {
    let parts_each = epilogue.parts().comptime();
    let own = comptime!(OUTPUTS / epilogue.parts());
    let first = CUBE_POS * own;
    if first >= outputs {
        terminate!();
    }
    let planes = comptime!(planes(tiles));
    let ahead = (tiles == 1).comptime();
    let unit = UNIT_POS as usize;
    let lane = unit % PLANE;
    let plane = unit / PLANE;
    let r = lane / 4;
    let j = lane % 4;
    let def = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let width = inputs / 8;
    let low = min(first + r, outputs - 1) * width + j;
    let mut high = min(first + r + 8, outputs - 1) * width + j;
    if comptime!(epilogue.gated) {
        high = low + outputs * width;
    }
    let none = Vector::<f32, Const<2>>::new(0.0f32);
    let mut sums = Array::<Vector<f32, Const<2>>>::new(comptime!(2 * tiles));
    #[unroll]
    for i in 0..comptime!(2 * tiles) {
        sums[i] = none;
    }

    let pieces = inputs / 32;
    let step = comptime!(planes * PIECES);
    let mut piece = plane * PIECES;
    let mut w = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * PIECES));
    if ahead {
        read_weights(weight, &mut w, low, high, piece, pieces);
    }
    while piece < pieces {
        if comptime!(!ahead) {
            read_weights(weight, &mut w, low, high, piece, pieces);
        }
        let mut v = Array::<Vector<u32, Const<4>>>::new(comptime!(tiles * PIECES));
        #[unroll]
        for p in 0..PIECES {
            #[unroll]
            for tile in 0..tiles {
                let row = 8 * tile + r;
                let mut own = Vector::<u32, Const<4>>::new(0u32);
                if row < rows && piece + p < pieces {
                    own = x[row * width + 4 * (piece + p) + j];
                }
                v[p * tiles + tile] = own;
            }
        }
        let mut next = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * PIECES));
        if ahead {
            read_weights(weight, &mut next, low, high, piece + step, pieces);
        }
        #[unroll]
        for p in 0..PIECES {
            #[unroll]
            for half in 0..2usize {
                let (even, odd) = (comptime!(2 * half), comptime!(2 * half + 1));
                let mut a = Array::<Vector<E, Const<2>>>::new(4usize);
                a[0] = Vector::reinterpret(w[2 * p].extract(even));
                a[1] = Vector::reinterpret(w[2 * p + 1].extract(even));
                a[2] = Vector::reinterpret(w[2 * p].extract(odd));
                a[3] = Vector::reinterpret(w[2 * p + 1].extract(odd));
                #[unroll]
                for tile in 0..tiles {
                    let own = v[p * tiles + tile];
                    let mut b = Array::<Vector<E, Const<2>>>::new(2usize);
                    b[0] = Vector::reinterpret(own.extract(even));
                    b[1] = Vector::reinterpret(own.extract(odd));
                    let mut acc = Array::<Vector<f32, Const<2>>>::new(2usize);
                    acc[0] = sums[2 * tile];
                    acc[1] = sums[2 * tile + 1];
                    acc = def.execute(&a, &b, &acc);
                    sums[2 * tile] = acc[0];
                    sums[2 * tile + 1] = acc[1];
                }
            }
        }
        if ahead {
            #[unroll]
            for i in 0..comptime!(2 * PIECES) {
                w[i] = next[i];
            }
        }
        piece += step;
    }

    let wide = comptime!(8 * tiles);
    let mut parts = Shared::<[f32]>::new_slice(comptime!(planes * OUTPUTS * wide));
    #[unroll]
    for tile in 0..tiles {
        #[unroll]
        for e in 0..2usize {
            let row = 8 * tile + 2 * j + e;
            parts[(plane * wide + row) * OUTPUTS + r] = sums[2 * tile].extract(e);
            parts[(plane * wide + row) * OUTPUTS + r + 8] = sums[2 * tile + 1].extract(e);
        }
    }
    sync_cube();
    let mut at = unit;
    while at < wide * own {
        let (row, column) = (at / own, at % own);
        let output = first + column;
        let mut totals = Array::<f32>::new(2usize);
        #[unroll]
        for part in 0..parts_each {
            let mut total = 0.0f32;
            #[unroll]
            for p in 0..planes {
                total += parts[(p * wide + row) * OUTPUTS + column + 8 * part];
            }
            totals[part] = total;
        }
        if row < rows && output < outputs {
            let to = row * outputs + output;
            y[to] = finish::<E>(
                bias,
                residual,
                totals[0],
                totals[comptime!(epilogue.parts() - 1)],
                output,
                outputs,
                to,
                epilogue,
            );
        }
        at += comptime!(planes * PLANE);
    }
}

/// Reads pieces of outputs `r` and `r + 8`; those beyond the end meet zeros.
#[cube]
fn read_weights(
    weight: &[Vector<u32, Const<4>>],
    w: &mut Array<Vector<u32, Const<4>>>,
    low: usize,
    high: usize,
    piece: usize,
    pieces: usize,
) {
    #[unroll]
    for p in 0..PIECES {
        let at = min(piece + p, pieces - 1) * 4;
        w[2 * p] = weight[low + at];
        w[2 * p + 1] = weight[high + at];
    }
}
