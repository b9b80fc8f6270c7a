//! Few rows times a weight matrix by matrix instructions, `y = x Wᵀ`, in f16 and bf16. A plane has
//! 16 outputs. The planes of a cube share the sums of some outputs, or each group of planes has its
//! own outputs and shares the reads of the rows. Weights go from memory to registers in 16-byte
//! pieces. Every output is summed in one order, however many rows there are.
//!
//! In a plane, lane `4 r + j` holds outputs `r` and `r + 8` of rows `2 j` and `2 j + 1`. In a gated
//! product, `r` is a gate and `r + 8` is the output that it gates.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::args::EpilogueConfig;
use super::epilogue::{ProductOutputs, added_to, finish};

/// Outputs of a plane.
const OUTPUTS: usize = 16;
const PLANE: usize = 32;
/// Planes of a cube. Cubes of eight planes end at about one time, where sixteen would leave half a
/// wave empty.
pub(super) const PLANES: usize = 8;
/// Pieces of 32 elements that a plane takes at a time.
const PIECES: usize = 2;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    /// Tiles of 8 rows of `x`.
    tiles: usize,
    /// Groups of planes, each with outputs of its own.
    groups: usize,
    /// Whether planes read their next weights before they multiply the current ones.
    ahead: bool,
    /// Whether weights, which are read once, bypass the first cache and leave it to the rows.
    streams: bool,
    epilogue: EpilogueConfig,
}

impl Blueprint {
    /// The configuration for `tiles` tiles of 8 rows and `weights` rows of weights. Up to 8 rows,
    /// planes read ahead; with more rows, the rows take the registers. Where the outputs fill every
    /// processor, two groups of four planes share the reads of the rows, and each sum has four
    /// planes.
    pub(super) fn new(
        tiles: usize,
        weights: usize,
        processors: usize,
        streams: bool,
        epilogue: EpilogueConfig,
    ) -> Self {
        // The number of rows must not matter: it would change the order of a row's sums.
        let shares = weights / OUTPUTS >= 4 * processors;
        let groups = if shares { 2 } else { 1 };
        Self { tiles, groups, ahead: tiles == 1, streams, epilogue }
    }

    /// Outputs of a cube.
    pub(super) fn outputs(self) -> usize {
        self.groups * OUTPUTS / self.epilogue.parts()
    }
}

/// # Shapes
/// `x` `[M, K / 8]` and `weight` `[N, K / 8]`, in vectors of four pairs of elements. `N` is the
/// outputs, or twice the outputs where gated.
#[cube(launch_unchecked)]
pub(super) fn tensor_core_kernel<E: Float>(
    x: &[Vector<u32, Const<4>>],
    weight: &[Vector<u32, Const<4>>],
    product: &mut ProductOutputs<E>,
    inputs: usize,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    let tiles = blueprint.tiles.comptime();
    let groups = blueprint.groups.comptime();
    let ahead = blueprint.ahead.comptime();
    let streams = blueprint.streams.comptime();
    let epilogue = blueprint.epilogue.comptime();
    let parts_each = epilogue.parts().comptime();
    let own = comptime!(OUTPUTS / epilogue.parts());
    let (rows, outputs) = (product.rows, product.outputs);
    let cube_first = CUBE_POS * comptime!(own * groups);
    if cube_first >= outputs {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let lane = unit % PLANE;
    let plane = unit / PLANE;
    let first = cube_first + plane % groups * own;
    let part_of_sum = plane / groups;
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
    let step = comptime!(PLANES / groups * PIECES);
    let mut piece = part_of_sum * PIECES;
    let mut w = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * PIECES));
    if ahead {
        read_weights(weight, &mut w, low, high, piece, pieces, streams);
    }
    while piece < pieces {
        if comptime!(!ahead) {
            read_weights(weight, &mut w, low, high, piece, pieces, streams);
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
            read_weights(weight, &mut next, low, high, piece + step, pieces, streams);
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
    let mut parts = Shared::<[f32]>::new_slice(comptime!(PLANES * OUTPUTS * wide));
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
    let all = comptime!(own * groups);
    while at < wide * all {
        let (row, mixed) = (at / all, at % all);
        let (owner, column) = (mixed / own, mixed % own);
        let output = cube_first + mixed;
        let mut totals = Array::<f32>::new(2usize);
        #[unroll]
        for part in 0..parts_each {
            let mut total = 0.0f32;
            #[unroll]
            for p in 0..comptime!(PLANES / groups) {
                total += parts[((p * groups + owner) * wide + row) * OUTPUTS + column + 8 * part];
            }
            totals[part] = total;
        }
        if row < rows && output < outputs {
            let to = row * outputs + output;
            product.y[to] = finish::<E>(
                &product.bias,
                added_to::<E>(&product.residual, to, epilogue),
                totals[0],
                totals[comptime!(epilogue.parts() - 1)],
                output,
                outputs,
                epilogue,
            );
        }
        at += comptime!(PLANES * PLANE);
    }
}

/// Reads pieces of outputs `r` and `r + 8`. Pieces after the end are multiplied by zeros.
#[cube]
fn read_weights(
    weight: &[Vector<u32, Const<4>>],
    w: &mut Array<Vector<u32, Const<4>>>,
    low: usize,
    high: usize,
    piece: usize,
    pieces: usize,
    #[comptime] streams: bool,
) {
    #[unroll]
    for p in 0..PIECES {
        let at = min(piece + p, pieces - 1) * 4;
        if streams {
            w[2 * p] = read_once(weight, low + at);
            w[2 * p + 1] = read_once(weight, high + at);
        } else {
            w[2 * p] = weight[low + at];
            w[2 * p + 1] = weight[high + at];
        }
    }
}

/// Reads weights that no other plane reads. The read bypasses the first cache, which keeps the
/// rows, and brings 256 bytes into the L2 cache.
#[cube]
#[allow(unused_assignments, reason = "what PTX writes looks unwritten to the compiler")]
fn read_once(from: &[Vector<u32, Const<4>>], at: usize) -> Vector<u32, Const<4>> {
    let mut v = Vector::<u32, Const<4>>::empty();
    let place = from[at..at + 1].as_ptr();
    gpu_asm!(
        "ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {v}, [{place}];",
        v = out(_) v, place = mem_in(_) place, options(explicit_mem)
    );
    v
}
