//! Few rows times a weight matrix on Hopper: f16 and bf16. A cube a processor, which copies its share of the weights
//! into shared memory without a pause: while it ends some outputs, those of the next are on their way. Copies hold no
//! registers, and the rows come the same way, as loads that hit a cache would wait behind those that miss it. Where the
//! rows are to be normalised, they are multiplied by the gain as they come, and their sums are divided by the root of
//! their mean square in the end, which the cube has found on the way: nothing waits for it.
//!
//! In a plane, as in [`tensor_core`](super::tensor_core), lane `4 r + j` holds outputs `r` and `r + 8` of a unit of 16
//! and rows `2 j` and `2 j + 1`; of a gated product, `r` is a gate and `r + 8` what it gates. Every plane has blocks of
//! the sums, stages and barriers of its own. Every output is summed in the same order however many rows there are.

mod parts;

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

use self::parts::{copy, products, squares_of, store};
use crate::extension::EpilogueConfig;
use crate::hopper::{TILE_COLUMNS, init_barrier, publish_barriers, wait_barrier};

/// Rows of weights in a unit.
const UNIT: usize = 16;
const PLANES: usize = 8;
const PLANE: usize = 32;
/// Threads of a cube.
pub(super) const CUBE: usize = PLANES * PLANE;
/// Pieces of 16 bytes in a row of a tile.
const PIECES: usize = 8;
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
/// are shared by `cubes`. `bias` `[N]` and `residual` `[M, outputs]`, where there are any; in pieces of 16 bytes, where
/// rows are normalised, `gain` `[K / 8]`.
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
    let together = blueprint.together.comptime();
    let weight_tiles = comptime!(blueprint.weight_tiles());
    let stage_tiles = comptime!(weight_tiles + tiles);
    let ring = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!(PLANES * stages * stage_tiles * TILE),
        1024usize,
    );
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(PLANES * stages), 16usize);
    let wide = comptime!(8 * tiles);
    let unit_rows = comptime!(blueprint.together * UNIT);
    let mut parts = Shared::<[f32]>::new_slice(comptime!(PLANES * wide * unit_rows));
    let mut row_squares = Shared::<[f32]>::new_slice(comptime!(PLANES * wide));

    let plane = UNIT_POS as usize / PLANE;
    let lane = UNIT_POS as usize % PLANE;
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
    let items = (end - first).div_ceil(together) * turns;
    let mut begun = 0usize;
    if lane == 0 {
        while begun < min(items, stages) {
            copy::<E>(
                x,
                weight,
                own_barriers,
                ring_bytes,
                begun,
                turns,
                first,
                end,
                plane,
                outputs,
                blueprint,
            );
            begun += 1;
        }
    }
    let mut squares = Array::<f32>::new(tiles);
    #[unroll]
    for tile in 0..tiles {
        squares[tile] = 0.0f32;
    }
    let def = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let none = Vector::<f32, Const<2>>::new(0.0f32);
    let mut sums = Array::<Vector<f32, Const<2>>>::new(comptime!(2 * together * tiles));
    #[unroll]
    for i in 0..comptime!(2 * together * tiles) {
        sums[i] = none;
    }
    for item in 0..items {
        let mut gains = Array::<Vector<u32, Const<4>>>::new(2usize);
        if comptime!(blueprint.normalises) {
            let first = (item % turns * PLANES + plane) * PIECES + 2 * j;
            #[unroll]
            for p in 0..2usize {
                // Behind the end, zeros stay zeros.
                gains[p] = gain[min(first + p, inputs / PIECES - 1)];
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
                    v[i] = products(v[i], gains[p], blueprint.name);
                }
            }
            #[unroll]
            for half in 0..2usize {
                let (even, odd) = (comptime!(2 * half), comptime!(2 * half + 1));
                #[unroll]
                for unit in 0..together {
                    let mut a = Array::<Vector<E, Const<2>>>::new(4usize);
                    a[0] = Vector::reinterpret(w[2 * unit].extract(even));
                    a[1] = Vector::reinterpret(w[2 * unit + 1].extract(even));
                    a[2] = Vector::reinterpret(w[2 * unit].extract(odd));
                    a[3] = Vector::reinterpret(w[2 * unit + 1].extract(odd));
                    #[unroll]
                    for tile in 0..tiles {
                        let mut b = Array::<Vector<E, Const<2>>>::new(2usize);
                        b[0] = Vector::reinterpret(v[tile].extract(even));
                        b[1] = Vector::reinterpret(v[tile].extract(odd));
                        let to = comptime!(2 * (unit * tiles + tile));
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
            for unit in 0..together {
                #[unroll]
                for tile in 0..tiles {
                    let from = comptime!(2 * (unit * tiles + tile));
                    #[unroll]
                    for e in 0..2usize {
                        let row = 8 * tile + 2 * j + e;
                        let to = (plane * wide + row) * unit_rows + unit * UNIT + r;
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
                    let mut sum = squares[tile];
                    sum += plane_shuffle_xor(sum, 1u32);
                    sum += plane_shuffle_xor(sum, 2u32);
                    if j == 0 {
                        row_squares[plane * wide + 8 * tile + r] = sum;
                    }
                }
            }
            sync_cube();
            let done = first + item / turns * together;
            store::<E>(
                &parts,
                &row_squares,
                bias,
                residual,
                y,
                done,
                min(done + together, end),
                rows,
                outputs,
                inputs,
                epsilon,
                blueprint,
            );
        }
    }
}
