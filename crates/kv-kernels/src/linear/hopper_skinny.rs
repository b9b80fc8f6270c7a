//! Few rows times a weight matrix on Hopper: f16 and bf16. A cube a processor, which copies its share of the weights
//! into shared memory without a pause: while it ends some outputs, those of the next are on their way. Copies hold no
//! registers, and the rows come the same way, as loads that hit a cache would wait behind those that miss it. Where the
//! rows are to be normalised, they are multiplied by the gain as they come, and their sums are divided by the root of
//! their mean square in the end, which the cube has found on the way: nothing waits for it.
//!
//! In a plane, as in [`tensor_core`](super::tensor_core), lane `4 r + j` holds outputs `r` and `r + 8` of a unit of 16
//! and rows `2 j` and `2 j + 1`; of a gated product, `r` is a gate and `r + 8` what it gates. Every plane has its own
//! blocks of the sums, its own stages and barriers. Every output is summed in the same order however many rows there are.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

use super::epilogue::finish;
use crate::extension::EpilogueConfig;
use crate::hopper::{
    TILE_COLUMNS, arrive_expecting, copy_tile, init_barrier, publish_barriers, wait_barrier,
};

/// Rows of weights in a unit.
const UNIT: usize = 16;
const PLANES: usize = 8;
const PLANE: usize = 32;
/// Units of a cube.
pub(super) const CUBE: usize = PLANES * PLANE;
/// Pieces of 16 bytes in a row of a tile.
const PIECES: usize = 8;
/// What rows times gains are made smaller by before they are rounded: rows of f16 that are not normalised yet may be
/// large.
const SHRINKS: f32 = 1.0 / 16.0;
/// Bytes and pieces of a tile of 8 rows: what the swizzle repeats after.
const TILE_BYTES: usize = 8 * 128;
const TILE: usize = 8 * PIECES;

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    /// Tiles of 8 rows.
    tiles: usize,
    /// Units that a plane multiplies at once: the rows are copied for so many.
    together: usize,
    /// Blocks of 64 columns that are on their way or in use, a plane.
    stages: usize,
    /// Whether the rows are normalised first.
    normalises: bool,
    /// The factors' type, as PTX spells it.
    name: &'static str,
    epilogue: EpilogueConfig,
}

impl Blueprint {
    /// For so many rows of so many outputs, shared by so many `cubes`, of factors that PTX calls `name`.
    pub(super) fn new(
        [rows, outputs, cubes]: [usize; 3],
        name: &'static str,
        normalises: bool,
        epilogue: EpilogueConfig,
    ) -> Self {
        let tiles = rows.div_ceil(8);
        let units = outputs.div_ceil(unit_outputs(epilogue));
        // As many units as a cube has, and stages as shared memory has room for. Neither changes the order of sums.
        let (together, stages) = match tiles {
            1..=3 if units > 2 * cubes => (4, 2),
            1..=2 => (2, 4),
            _ => (2, 3),
        };
        Self { tiles, together, stages, normalises, name, epilogue }
    }

    /// Tiles of 8 rows of weights in a stage.
    fn weight_tiles(self) -> usize {
        self.together * UNIT / 8
    }

    /// Rows of the copied tiles of `x`.
    pub(super) fn rows(self) -> usize {
        8 * self.tiles
    }

    /// Rows of a copied tile of the weights: gates and what they gate come one by one.
    pub(super) fn weight_rows(self) -> usize {
        unit_outputs(self.epilogue)
    }
}

/// Outputs of a unit.
pub(super) fn unit_outputs(epilogue: EpilogueConfig) -> usize {
    UNIT / epilogue.parts()
}

/// # Shapes
/// `x` `[M, K]`, `weight` `[N, K]`, `y` `[M, outputs]`, where `N` is `outputs`, or twice as many where gated; `units`
/// are shared by `cubes`. In pieces of 16 bytes, where rows are normalised: `gain` `[K / 8]`.
#[cube(launch_unchecked)]
pub(super) fn skinny_kernel<E: Float>(
    x: &TensorMap<E, Tiled>,
    weight: &TensorMap<E, Tiled>,
    gain: &[Vector<u32, Const<4>>],
    bias: &[E],
    residual: &[E],
    y: &mut [E],
    rows: usize,
    outputs: usize,
    inputs: usize,
    units: usize,
    cubes: usize,
    epsilon: f32,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    let tiles = blueprint.tiles.comptime();
    let stages = blueprint.stages.comptime();
    let own_units = blueprint.together.comptime();
    let weight_tiles = comptime!(blueprint.weight_tiles());
    let stage_tiles = comptime!(weight_tiles + tiles);
    let ring = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!(PLANES * stages * stage_tiles * TILE),
        1024usize,
    );
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(PLANES * stages), 16usize);
    let wide = comptime!(8 * tiles);
    let together = comptime!(blueprint.together * UNIT);
    let mut parts = Shared::<[f32]>::new_slice(comptime!(PLANES * wide * together));
    let mut row_squares = Shared::<[f32]>::new_slice(comptime!(PLANES * wide));

    let unit = UNIT_POS as usize;
    let plane = unit / PLANE;
    let lane = unit % PLANE;
    let r = lane / 4;
    let j = lane % 4;
    let own_ring = plane * comptime!(stages * stage_tiles * TILE);
    let ring_bytes = generic_to_shared::<Vector<u32, Const<4>>>(ring.as_ptr())
        + (plane * comptime!(stages * stage_tiles * TILE_BYTES)) as u32;
    let own_barriers = generic_to_shared::<u64>(barriers.as_ptr()) + (plane * stages * 8) as u32;
    if lane == 0 {
        #[unroll]
        for stage in 0..comptime!(stages as u32) {
            init_barrier(own_barriers + comptime!(8 * stage), 1u32);
        }
        publish_barriers();
    }
    sync_plane();

    let cube = CUBE_POS;
    let first = cube * units / cubes;
    let end = (cube + 1) * units / cubes;
    // Blocks of 64 columns in turn to every plane; those behind the end are zeros.
    let turns = inputs.div_ceil(comptime!(PLANES * TILE_COLUMNS));
    let items = (end - first).div_ceil(own_units) * turns;
    let mut item = 0usize;
    if lane == 0 {
        while item < min(items, stages) {
            copy::<E>(
                x,
                weight,
                own_barriers,
                ring_bytes,
                item,
                turns,
                first,
                end,
                plane,
                outputs,
                blueprint,
            );
            item += 1;
        }
    }
    let both = Vector::<E, Const<2>>::new(E::new(SHRINKS));
    let shrinks = Vector::<u32, Const<4>>::new(u32::reinterpret(both));
    let mut squares = Array::<f32>::new(tiles);
    #[unroll]
    for tile in 0..tiles {
        squares[tile] = 0.0f32;
    }
    let def = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let none = Vector::<f32, Const<2>>::new(0.0f32);
    let mut sums = Array::<Vector<f32, Const<2>>>::new(comptime!(2 * own_units * tiles));
    #[unroll]
    for i in 0..comptime!(2 * own_units * tiles) {
        sums[i] = none;
    }
    for item in 0..items {
        let mut weights = Array::<Vector<u32, Const<4>>>::new(2usize);
        if comptime!(blueprint.normalises) {
            let own = (item % turns * PLANES + plane) * PIECES + 2 * j;
            #[unroll]
            for p in 0..2usize {
                // Behind the end, zeros stay zeros.
                let own = gain[min(own + p, inputs / PIECES - 1)];
                weights[p] = products(own, shrinks, blueprint.name);
            }
        }
        let stage = item % stages;
        wait_barrier(own_barriers + 8 * stage as u32, (item / stages) as u32);
        let at = own_ring + stage * comptime!(stage_tiles * TILE);
        #[unroll]
        for p in 0..2usize {
            // Neighbouring lanes' pieces are two apart, so that eight lanes read from all banks at once.
            let piece = at + r * PIECES + ((2 * j + p) ^ r);
            let mut w = Array::<Vector<u32, Const<4>>>::new(weight_tiles);
            #[unroll]
            for i in 0..weight_tiles {
                w[i] = ring[piece + i * TILE];
            }
            let mut v = Array::<Vector<u32, Const<4>>>::new(tiles);
            #[unroll]
            for i in 0..tiles {
                v[i] = ring[piece + comptime!((weight_tiles + i) * TILE)];
            }
            if comptime!(blueprint.normalises) {
                if item < turns {
                    #[unroll]
                    for i in 0..tiles {
                        squares[i] += squares_of::<E>(v[i]);
                    }
                }
                #[unroll]
                for i in 0..tiles {
                    v[i] = products(v[i], weights[p], blueprint.name);
                }
            }
            #[unroll]
            for half in 0..2usize {
                let (even, odd) = (comptime!(2 * half), comptime!(2 * half + 1));
                #[unroll]
                for own in 0..own_units {
                    let mut a = Array::<Vector<E, Const<2>>>::new(4usize);
                    a[0] = Vector::reinterpret(w[2 * own].extract(even));
                    a[1] = Vector::reinterpret(w[2 * own + 1].extract(even));
                    a[2] = Vector::reinterpret(w[2 * own].extract(odd));
                    a[3] = Vector::reinterpret(w[2 * own + 1].extract(odd));
                    #[unroll]
                    for tile in 0..tiles {
                        let mut b = Array::<Vector<E, Const<2>>>::new(2usize);
                        b[0] = Vector::reinterpret(v[tile].extract(even));
                        b[1] = Vector::reinterpret(v[tile].extract(odd));
                        let to = comptime!(2 * (own * tiles + tile));
                        let mut acc = Array::<Vector<f32, Const<2>>>::new(2usize);
                        acc[0] = sums[to];
                        acc[1] = sums[comptime!(to + 1)];
                        acc = def.execute(&a, &b, &acc);
                        sums[to] = acc[0];
                        sums[comptime!(to + 1)] = acc[1];
                    }
                }
            }
        }
        sync_plane();
        if lane == 0 && item + stages < items {
            copy::<E>(
                x,
                weight,
                own_barriers,
                ring_bytes,
                item + stages,
                turns,
                first,
                end,
                plane,
                outputs,
                blueprint,
            );
        }
        if item % turns == turns - 1 {
            // All have read the sums of the outputs before.
            sync_cube();
            #[unroll]
            for own in 0..own_units {
                #[unroll]
                for tile in 0..tiles {
                    let from = comptime!(2 * (own * tiles + tile));
                    #[unroll]
                    for e in 0..2usize {
                        let row = 8 * tile + 2 * j + e;
                        let to = (plane * wide + row) * together + own * UNIT + r;
                        parts[to] = sums[from].extract(e);
                        parts[to + 8] = sums[comptime!(from + 1)].extract(e);
                    }
                    sums[from] = none;
                    sums[comptime!(from + 1)] = none;
                }
            }
            if comptime!(blueprint.normalises) && item < turns {
                #[unroll]
                for tile in 0..tiles {
                    let mut own = squares[tile];
                    own += plane_shuffle_xor(own, 1u32);
                    own += plane_shuffle_xor(own, 2u32);
                    if j == 0 {
                        row_squares[plane * wide + 8 * tile + r] = own;
                    }
                }
            }
            sync_cube();
            let done = first + item / turns * own_units;
            store::<E>(
                &parts,
                &row_squares,
                bias,
                residual,
                y,
                done,
                min(done + own_units, end),
                rows,
                outputs,
                inputs,
                epsilon,
                blueprint,
            );
        }
    }
}

/// Copies an item's tiles: a plane's next block of 64 columns of the outputs that the cube works at then.
#[cube]
#[allow(clippy::too_many_arguments)]
fn copy<E: Float>(
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
    let own_units = blueprint.together.comptime();
    let weight_tiles = comptime!(blueprint.weight_tiles());
    let gated = comptime!(blueprint.epilogue.gated);
    let own = comptime!(UNIT / blueprint.epilogue.parts());
    let unit_bytes = comptime!((UNIT / 8 * TILE_BYTES) as u32);
    let stage = (item % stages) as u32;
    let column = ((item % turns * PLANES + plane) * TILE_COLUMNS) as u32;
    let unit = first + item / turns * own_units;
    let count = min(end - unit, own_units);
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
        let (to, row) = (to + i as u32 * unit_bytes, (unit + i) * own);
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
fn store<E: Float>(
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
    let own = comptime!(UNIT / epilogue.parts());
    let wide = comptime!(8 * blueprint.tiles);
    let together = comptime!(blueprint.together * UNIT);
    let all = comptime!(blueprint.together * own);
    let mut at = UNIT_POS as usize;
    while at < rows * all {
        let (row, mixed) = (at / all, at % all);
        let (unit, column) = (mixed / own, mixed % own);
        let output = (done + unit) * own + column;
        if done + unit < end && output < outputs {
            let mut scale = 1.0f32;
            if comptime!(blueprint.normalises) {
                let mut squares = 0.0f32;
                #[unroll]
                for plane in 0..PLANES {
                    squares += row_squares[plane * wide + row];
                }
                let root = (squares / f32::cast_from(inputs) + epsilon).sqrt();
                scale = comptime!(1.0 / SHRINKS) / root;
            }
            let mut totals = Array::<f32>::new(2usize);
            #[unroll]
            for part in 0..each {
                let mut total = 0.0f32;
                #[unroll]
                for plane in 0..PLANES {
                    total +=
                        parts[(plane * wide + row) * together + unit * UNIT + column + 8 * part];
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
fn squares_of<E: Float>(piece: Vector<u32, Const<4>>) -> f32 {
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
fn products(
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
