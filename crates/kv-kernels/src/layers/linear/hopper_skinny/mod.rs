//! Few rows times a weight matrix on Hopper, `y = x Wᵀ`, in f16 and bf16. Each processor has one
//! cube, which copies its share of the weights into shared memory without a pause: while it stores
//! some outputs, the weights of the next outputs arrive. Copies hold no registers. Rows are copied
//! too, because loads that hit a cache would wait behind loads that miss it. Arrived tiles go into
//! registers at once, in the order that matrix instructions take, and make room for the next.
//! `tensor_core.rs` serves other devices.
//!
//! Where rows are normalised, they are multiplied by the gain as they arrive, and sums are divided
//! by the root of the mean square at the end. The cube has computed that root meanwhile, so nothing
//! waits for it.
//!
//! In a plane, as in [`tensor_core`](super::tensor_core), lane `4 r + j` holds outputs `r` and `r +
//! 8` of a unit of 16 outputs, and rows `2 j` and `2 j + 1`. In a gated product, `r` is a gate and
//! `r + 8` is the output that it gates. Every plane has blocks of the sums, stages and barriers of
//! its own. Every output is summed in one order, however many rows there are.

mod parts;

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

use self::parts::{
    PlaneParts, ProductShape, Ring, Units, copy, load_matrices, products, read_ahead, squares_of,
    store, wait_for_reads, weight_place, x_place,
};
use super::args::EpilogueConfig;
use super::epilogue::ProductOutputs;
use crate::components::tma::{TILE_COLUMNS, init_barrier, publish_barriers, wait_barrier};
use crate::peers::{PeerGroup, PeerSlots, begin_turn, count_turn};

/// Rows of weights in a unit.
const UNIT: usize = 16;
const PLANES: usize = 8;
const PLANE: usize = 32;
/// Bytes of a cube's shared memory for sums and stages.
const ROOM: usize = (227 << 10) - 2_048;
/// The most stages: this many keep the memory busy.
const MOST_STAGES: usize = 4;
/// Threads of a cube.
pub(super) const CUBE: usize = PLANES * PLANE;
/// Pieces of 16 bytes in a row of a tile.
const PIECES: usize = 8;
/// Products of 16 columns in a row of a tile.
const STEPS: usize = TILE_COLUMNS / 16;
/// Bytes and pieces of a tile of 8 rows, after which the swizzle repeats.
const TILE_BYTES: usize = 8 * 128;
const TILE: usize = 8 * PIECES;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    /// Tiles of 8 rows.
    tiles: usize,
    /// Units that a plane multiplies at once, with one copy of the rows.
    together: usize,
    /// Blocks of 64 columns that a plane has in use or in flight.
    stages: usize,
    /// Whether the rows are normalised first.
    normalises: bool,
    /// The factors' type, as PTX spells it.
    name: &'static str,
    epilogue: EpilogueConfig,
    /// The ranks that add their results.
    peers: PeerGroup,
}

impl Blueprint {
    /// The configuration for `rows` rows and `outputs` outputs, which `cubes` cubes share. PTX
    /// calls the factors' type `name`.
    pub(super) fn new(
        [rows, outputs, cubes]: [usize; 3],
        name: &'static str,
        normalises: bool,
        epilogue: EpilogueConfig,
        peers: PeerGroup,
    ) -> Self {
        let tiles = rows.div_ceil(8);
        // A cube's units are divided evenly, and there are as many stages as shared memory has room
        // for. Neither changes the order of sums.
        let units = outputs.div_ceil(unit_outputs(epilogue)).div_ceil(cubes);
        let most = if tiles <= 3 { 4 } else { 2 };
        let together = units.div_ceil(units.div_ceil(most));
        let sums = PLANES * 8 * tiles * together * UNIT * size_of::<f32>();
        let stage = PLANES * (together * UNIT / 8 + tiles) * TILE_BYTES;
        let stages = ((ROOM - sums) / stage).min(MOST_STAGES);
        Self { tiles, together, stages, normalises, name, epilogue, peers }
    }

    /// Tiles of 8 rows of weights in a stage.
    fn weight_tiles(self) -> usize {
        self.together * UNIT / 8
    }

    /// The most outputs that a thread stores of the units that are multiplied at once.
    fn stored(self) -> usize {
        (8 * self.tiles * self.together * self.weight_rows()).div_ceil(CUBE)
    }

    /// Rows of the copied tiles of `x`.
    pub(super) fn rows(self) -> usize {
        8 * self.tiles
    }

    /// Rows of a copied tile of the weights. Gates and the outputs that they gate are copied one
    /// after the other.
    pub(super) fn weight_rows(self) -> usize {
        unit_outputs(self.epilogue)
    }
}

/// Outputs of a unit.
pub(super) fn unit_outputs(epilogue: EpilogueConfig) -> usize {
    UNIT / epilogue.parts()
}

/// The rows of a product, and how cubes share its outputs.
#[derive(CubeType, CubeLaunch)]
pub(super) struct StreamedRows {
    /// The norm's weights, where rows are normalised, `[K / 2]`, in pairs.
    gain: Box<[u32]>,
    /// The number that is added to the rows' mean squares, where rows are normalised.
    epsilon: f32,
    /// `K`
    inputs: usize,
    /// Units of outputs, which the cubes share.
    units: usize,
    cubes: usize,
}

/// # Shapes
/// `x` `[M, K]`, `weight` `[N, K]`, where `N` is the outputs, or twice the outputs where gated.
#[cube(launch_unchecked)]
pub(super) fn skinny_kernel<E: Float>(
    x: &TensorMap<E, Tiled>,
    weight: &TensorMap<E, Tiled>,
    streamed: &StreamedRows,
    product: &mut ProductOutputs<E>,
    slots: &mut PeerSlots,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    let (rows, outputs) = (product.rows, product.outputs);
    let (inputs, units, cubes) = (streamed.inputs, streamed.units, streamed.cubes);
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
    let mut parts = PlaneParts {
        sums: Shared::<[f32]>::new_slice(comptime!(PLANES * wide * unit_rows)),
        squares: Shared::<[f32]>::new_slice(comptime!(PLANES * wide)),
    };

    let plane = UNIT_POS as usize / PLANE;
    let lane = UNIT_POS as usize % PLANE;
    let r = lane / 4;
    let j = lane % 4;
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
    let copies = Ring { stages: ring_bytes, barriers: own_barriers, end, outputs };
    let shape = ProductShape { rows, inputs, outputs, epsilon: streamed.epsilon };
    // The planes take blocks of 64 columns in turn. Blocks after the end are zeros.
    let turns = inputs.div_ceil(comptime!(PLANES * TILE_COLUMNS));
    // The turn and the first unit of the next copy; the stage and the parity of the next products.
    let mut copied_turn = 0usize;
    let mut copied = first;
    let mut stage = 0u32;
    let mut parity = 0u32;
    #[unroll]
    for begun in 0..stages {
        if lane == 0 && copied < end {
            copy::<E>(
                x,
                weight,
                &copies,
                comptime!(begun as u32).runtime(),
                copied_turn * PLANES + plane,
                copied,
                blueprint,
            );
        }
        copied_turn += 1;
        if copied_turn == turns {
            copied_turn = 0usize;
            copied += together;
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
    let mut ahead = Array::<f32>::new(comptime!(blueprint.stored()));
    #[unroll]
    for i in 0..comptime!(blueprint.stored()) {
        ahead[i] = 0.0f32;
    }
    let (weight_at, x_at) = (weight_place(lane), x_place(lane));
    let peers = blueprint.peers.comptime();
    let peer_turn = begin_turn(&*slots, peers);
    let mut unit = first;
    while unit < end {
        read_ahead::<E>(&product.residual, &mut ahead, unit, end, rows, outputs, blueprint);
        for turn in 0..turns {
            let mut gains = Array::<u32>::new(PIECES);
            if comptime!(blueprint.normalises) {
                #[unroll]
                for piece in 0..PIECES {
                    let pair = ((turn * PLANES + plane) * PIECES + piece) * 4 + j;
                    // After the end, the factors multiply zeros.
                    gains[piece] = streamed.gain[min(pair, inputs / 2 - 1)];
                }
            }
            wait_barrier(own_barriers + 8 * stage, parity);
            let from = ring_bytes + stage * comptime!((stage_tiles * TILE_BYTES) as u32);
            let mut w = Array::<Vector<u32, Const<4>>>::new(comptime!(together * STEPS));
            let mut v = Array::<Vector<u32, Const<4>>>::new(comptime!(tiles * STEPS / 2));
            #[unroll]
            for step in 0..STEPS {
                // The swizzle: the bits of a piece's place are its number, xor its row.
                let at = from + (weight_at ^ comptime!(32 * step as u32));
                #[unroll]
                for own in 0..together {
                    w[own * STEPS + step] =
                        load_matrices(at + comptime!((own * UNIT / 8 * TILE_BYTES) as u32));
                }
            }
            #[unroll]
            for half in 0..comptime!(STEPS / 2) {
                let at = from + (x_at ^ comptime!(64 * half as u32));
                #[unroll]
                for tile in 0..tiles {
                    v[tile * comptime!(STEPS / 2) + half] =
                        load_matrices(at + comptime!(((weight_tiles + tile) * TILE_BYTES) as u32));
                }
            }
            wait_for_reads(&w, &v, blueprint);
            sync_plane();
            if lane == 0 && copied < end {
                copy::<E>(
                    x,
                    weight,
                    &copies,
                    stage,
                    copied_turn * PLANES + plane,
                    copied,
                    blueprint,
                );
            }
            copied_turn += 1;
            if copied_turn == turns {
                copied_turn = 0usize;
                copied += together;
            }
            stage += 1u32;
            if stage == comptime!(stages as u32) {
                stage = 0u32;
                parity = 1u32 - parity;
            }
            if comptime!(blueprint.normalises) {
                if unit == first {
                    #[unroll]
                    for tile in 0..tiles {
                        #[unroll]
                        for half in 0..comptime!(STEPS / 2) {
                            let piece = v[tile * comptime!(STEPS / 2) + half];
                            squares[tile] += squares_of::<E>(piece);
                        }
                    }
                }
                #[unroll]
                for tile in 0..tiles {
                    #[unroll]
                    for half in 0..comptime!(STEPS / 2) {
                        let at = tile * comptime!(STEPS / 2) + half;
                        v[at] = products(v[at], &gains, 4 * half, blueprint.name);
                    }
                }
            }
            #[unroll]
            for step in 0..STEPS {
                let (low, high) = (comptime!(step % 2 * 2), comptime!(step % 2 * 2 + 1));
                #[unroll]
                for own in 0..together {
                    let quad = w[own * STEPS + step];
                    let mut a = Array::<Vector<E, Const<2>>>::new(4usize);
                    #[unroll]
                    for word in 0..4usize {
                        a[word] = Vector::reinterpret(quad.extract(word));
                    }
                    #[unroll]
                    for tile in 0..tiles {
                        let pieces = v[tile * comptime!(STEPS / 2) + step / 2];
                        let mut b = Array::<Vector<E, Const<2>>>::new(2usize);
                        b[0] = Vector::reinterpret(pieces.extract(low));
                        b[1] = Vector::reinterpret(pieces.extract(high));
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
        // All units have read the sums of the previous outputs.
        sync_cube();
        #[unroll]
        for own in 0..together {
            #[unroll]
            for tile in 0..tiles {
                let from = comptime!(2 * (own * tiles + tile));
                #[unroll]
                for e in 0..2usize {
                    let row = 8 * tile + 2 * j + e;
                    let to = (plane * wide + row) * unit_rows + own * UNIT + r;
                    parts.sums[to] = sums[from].extract(e);
                    parts.sums[to + 8] = sums[comptime!(from + 1)].extract(e);
                }
                sums[from] = none;
                sums[comptime!(from + 1)] = none;
            }
        }
        if comptime!(blueprint.normalises) && unit == first {
            #[unroll]
            for tile in 0..tiles {
                let mut sum = squares[tile];
                sum += plane_shuffle_xor(sum, 1u32);
                sum += plane_shuffle_xor(sum, 2u32);
                if j == 0 {
                    parts.squares[plane * wide + 8 * tile + r] = sum;
                }
            }
        }
        sync_cube();
        if comptime!(!peers.is_alone()) && unit == first {
            count_turn(slots, &peer_turn, cubes);
        }
        store::<E>(
            &parts,
            &product.bias,
            &ahead,
            &mut product.y,
            &peer_turn,
            &Units { first: unit, end: min(unit + together, end) },
            &shape,
            blueprint,
        );
        unit += together;
    }
}
