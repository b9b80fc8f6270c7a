//! What a cube does between its products: copies, sums over planes, and normalisation.

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

use super::{Blueprint, CUBE, PLANES, TILE_BYTES, UNIT};
use crate::hopper::{TILE_COLUMNS, arrive_expecting, copy_tile};
use crate::linear::epilogue::finish;

/// Copies an item's tiles: a plane's next block of 64 columns of the outputs that the cube works at then.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn copy<E: Float>(
    x: &TensorMap<E, Tiled>,
    weight: &TensorMap<E, Tiled>,
    barriers: u32,
    ring: u32,
    item: usize,
    turns: usize,
    first: usize,
    end: usize,
    plane: usize,
    outputs: usize,
    #[comptime] blueprint: Blueprint,
) {
    let stages = blueprint.stages.comptime();
    let tiles = blueprint.tiles.comptime();
    let together = blueprint.together.comptime();
    let weight_tiles = comptime!(blueprint.weight_tiles());
    let gated = comptime!(blueprint.epilogue.gated);
    let weight_rows = comptime!(blueprint.weight_rows());
    let unit_bytes = comptime!((UNIT / 8 * TILE_BYTES) as u32);
    let stage = (item % stages) as u32;
    let column = ((item % turns * PLANES + plane) * TILE_COLUMNS) as u32;
    let unit = first + item / turns * together;
    let count = min(end - unit, together);
    let barrier = barriers + 8 * stage;
    let to = ring + stage * comptime!(((weight_tiles + tiles) * TILE_BYTES) as u32);
    let weights = tensor_map_address(weight);
    arrive_expecting(barrier, count as u32 * unit_bytes + comptime!((tiles * TILE_BYTES) as u32));
    copy_tile(
        to + comptime!((weight_tiles * TILE_BYTES) as u32),
        tensor_map_address(x),
        column,
        0u32,
        barrier,
    );
    for i in 0..count {
        let (to, row) = (to + i as u32 * unit_bytes, (unit + i) * weight_rows);
        copy_tile(to, weights, column, row as u32, barrier);
        if gated {
            let ups = to + comptime!(TILE_BYTES as u32);
            copy_tile(ups, weights, column, (outputs + row) as u32, barrier);
        }
    }
}

/// Adds the planes' parts of units `done..end`, and stores what comes of them.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn store<E: Float>(
    parts: &Shared<[f32]>,
    row_squares: &Shared<[f32]>,
    bias: &[E],
    residual: &[E],
    y: &mut [E],
    done: usize,
    end: usize,
    rows: usize,
    outputs: usize,
    inputs: usize,
    epsilon: f32,
    #[comptime] blueprint: Blueprint,
) {
    let epilogue = blueprint.epilogue.comptime();
    let each = epilogue.parts().comptime();
    let weight_rows = comptime!(blueprint.weight_rows());
    let wide = comptime!(8 * blueprint.tiles);
    let unit_rows = comptime!(blueprint.together * UNIT);
    let all = comptime!(blueprint.together * weight_rows);
    let mut at = UNIT_POS as usize;
    while at < rows * all {
        let (row, mixed) = (at / all, at % all);
        let (unit, column) = (mixed / weight_rows, mixed % weight_rows);
        let output = (done + unit) * weight_rows + column;
        if done + unit < end && output < outputs {
            let mut scale = 1.0f32;
            if comptime!(blueprint.normalises) {
                let mut squares = 0.0f32;
                #[unroll]
                for plane in 0..PLANES {
                    squares += row_squares[plane * wide + row];
                }
                let root = (squares / f32::cast_from(inputs) + epsilon).sqrt();
                scale = 1.0f32 / root;
            }
            let mut totals = Array::<f32>::new(2usize);
            #[unroll]
            for part in 0..each {
                let mut total = 0.0f32;
                #[unroll]
                for plane in 0..PLANES {
                    total +=
                        parts[(plane * wide + row) * unit_rows + unit * UNIT + column + 8 * part];
                }
                totals[part] = total * scale;
            }
            let to = row * outputs + output;
            y[to] = finish::<E>(
                bias,
                residual,
                totals[0],
                totals[comptime!(each - 1)],
                output,
                outputs,
                to,
                epilogue,
            );
        }
        at += CUBE;
    }
}

/// The sum of a piece's squares.
#[cube]
pub(super) fn squares_of<E: Float>(piece: Vector<u32, Const<4>>) -> f32 {
    let mut squares = Vector::<f32, Const<2>>::new(0.0f32);
    #[unroll]
    for word in 0..4usize {
        let pair = wide_of::<E>(piece.extract(word));
        squares += pair * pair;
    }
    squares.extract(0usize) + squares.extract(1usize)
}

/// The products of eight numbers with eight others, each rounded.
#[cube]
#[allow(unused_assignments, reason = "what PTX writes looks unwritten to the compiler")]
pub(super) fn products(
    a: Vector<u32, Const<4>>,
    b: Vector<u32, Const<4>>,
    #[comptime] name: &'static str,
) -> Vector<u32, Const<4>> {
    let mut all = Vector::<u32, Const<4>>::empty();
    #[unroll]
    for word in 0..4usize {
        let (left, right) = (a.extract(word), b.extract(word));
        let mut product = 0u32;
        gpu_asm!(
            "mul.rn.{name}x2 {}, {}, {};",
            out(_) product, in(_) left, in(_) right, options(pure, nomem)
        );
        all.insert(word, product);
    }
    all
}

#[cube]
fn wide_of<E: Float>(word: u32) -> Vector<f32, Const<2>> {
    Vector::cast_from(Vector::<E, Const<2>>::reinterpret(word))
}
