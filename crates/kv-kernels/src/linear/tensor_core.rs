//! Few rows times a weight matrix, with matrix instructions: f16 and bf16. A cube has 16 outputs, or
//! 32 where reading the rows costs as much as reading the weights; its planes share the sum. Weights go from memory to registers in 16-byte pieces; every output is
//! summed in the same order however many rows there are.
//!
//! In a plane, lane `4 r + j` holds outputs `r` and `r + 8` of rows `2 j` and `2 j + 1`. Of a gated
//! product, `r` is a gate and `r + 8` what it gates.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::epilogue::finish;
use crate::extension::EpilogueConfig;

/// Outputs of a product.
const OUTPUTS: usize = 16;
const PLANE: usize = 32;
/// Pieces of 32 elements that a plane takes at a time.
const PIECES: usize = 2;

/// Products side by side in a plane for `tiles` of 8 rows: as many as shared memory has room for.
fn products_of(tiles: usize) -> usize {
    if tiles == 2 { 2 } else { 1 }
}

/// Outputs of a cube, of the weight matrix.
pub(super) fn outputs_of(tiles: usize) -> usize {
    OUTPUTS * products_of(tiles)
}

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
    let products = comptime!(products_of(tiles));
    let width_of_all = comptime!(outputs_of(tiles));
    // Outputs of a product, and of the cube.
    let each = comptime!(OUTPUTS / epilogue.parts());
    let own = comptime!(each * products);
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
    // Where the lane's two outputs of each product begin.
    let mut starts = Array::<usize>::new(comptime!(2 * products));
    #[unroll]
    for product in 0..products {
        let output = first + product * each + r;
        starts[2 * product] = min(output, outputs - 1) * width + j;
        starts[2 * product + 1] = min(output + 8, outputs - 1) * width + j;
        if comptime!(epilogue.gated) {
            starts[2 * product + 1] = starts[2 * product] + outputs * width;
        }
    }
    let none = Vector::<f32, Const<2>>::new(0.0f32);
    let mut sums = Array::<Vector<f32, Const<2>>>::new(comptime!(2 * tiles * products));
    #[unroll]
    for i in 0..comptime!(2 * tiles * products) {
        sums[i] = none;
    }

    let pieces = inputs / 32;
    let step = comptime!(planes * PIECES);
    let mut piece = plane * PIECES;
    let words = comptime!(2 * PIECES * products);
    let mut w = Array::<Vector<u32, Const<4>>>::new(words);
    if ahead {
        read_weights(weight, &mut w, &starts, piece, pieces, products);
    }
    while piece < pieces {
        if comptime!(!ahead) {
            read_weights(weight, &mut w, &starts, piece, pieces, products);
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
        let mut next = Array::<Vector<u32, Const<4>>>::new(words);
        if ahead {
            read_weights(weight, &mut next, &starts, piece + step, pieces, products);
        }
        #[unroll]
        for p in 0..PIECES {
            #[unroll]
            for half in 0..2usize {
                let (even, odd) = (comptime!(2 * half), comptime!(2 * half + 1));
                #[unroll]
                for product in 0..products {
                    let from = comptime!(2 * (p * products + product));
                    let mut a = Array::<Vector<E, Const<2>>>::new(4usize);
                    a[0] = Vector::reinterpret(w[from].extract(even));
                    a[1] = Vector::reinterpret(w[from + 1].extract(even));
                    a[2] = Vector::reinterpret(w[from].extract(odd));
                    a[3] = Vector::reinterpret(w[from + 1].extract(odd));
                    #[unroll]
                    for tile in 0..tiles {
                        let own = v[p * tiles + tile];
                        let mut b = Array::<Vector<E, Const<2>>>::new(2usize);
                        b[0] = Vector::reinterpret(own.extract(even));
                        b[1] = Vector::reinterpret(own.extract(odd));
                        let to = comptime!(2 * (product * tiles + tile));
                        let mut acc = Array::<Vector<f32, Const<2>>>::new(2usize);
                        acc[0] = sums[to];
                        acc[1] = sums[to + 1];
                        acc = def.execute(&a, &b, &acc);
                        sums[to] = acc[0];
                        sums[to + 1] = acc[1];
                    }
                }
            }
        }
        if ahead {
            #[unroll]
            for i in 0..words {
                w[i] = next[i];
            }
        }
        piece += step;
    }

    let wide = comptime!(8 * tiles);
    let mut parts = Shared::<[f32]>::new_slice(comptime!(planes * width_of_all * wide));
    #[unroll]
    for product in 0..products {
        #[unroll]
        for tile in 0..tiles {
            let from = comptime!(2 * (product * tiles + tile));
            #[unroll]
            for e in 0..2usize {
                let row = 8 * tile + 2 * j + e;
                let to = (plane * wide + row) * width_of_all + product * OUTPUTS + r;
                parts[to] = sums[from].extract(e);
                parts[to + 8] = sums[from + 1].extract(e);
            }
        }
    }
    sync_cube();
    let mut at = unit;
    while at < wide * own {
        let (row, column) = (at / own, at % own);
        let output = first + column;
        let from = column / each * OUTPUTS + column % each;
        let mut totals = Array::<f32>::new(2usize);
        #[unroll]
        for part in 0..parts_each {
            let mut total = 0.0f32;
            #[unroll]
            for p in 0..planes {
                total += parts[(p * wide + row) * width_of_all + from + 8 * part];
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

/// Reads pieces of the lane's outputs; those beyond the end meet zeros.
#[cube]
fn read_weights(
    weight: &[Vector<u32, Const<4>>],
    w: &mut Array<Vector<u32, Const<4>>>,
    starts: &Array<usize>,
    piece: usize,
    pieces: usize,
    #[comptime] products: usize,
) {
    #[unroll]
    for p in 0..PIECES {
        let at = min(piece + p, pieces - 1) * 4;
        #[unroll]
        for output in 0..comptime!(2 * products) {
            w[2 * p * products + output] = weight[starts[output] + at];
        }
    }
}
