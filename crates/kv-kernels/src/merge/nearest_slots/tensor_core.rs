//! The kernel of `nearest_slots` for matrix instructions: slots of one list as rows, and 8 slots of
//! the other list at a time as columns.
//!
//! The order of the summed dimension is free, so keys go from memory to registers in whole vectors.
//! Lane `4 r + j` of a plane reads every fourth vector of a key, from vector `j` on. It reads every
//! eighth of the plane's own slots, from slot `r` on, whose keys stay in registers; and slot `r` of
//! the 8 others. It gets the products of its own slots with the others `2 j` and `2 j + 1`. The
//! planes of a cube share the norms of the others.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::kernel_args::{Nearest, SlotLists};
use crate::components::sentinels::{NO_COSINE, NO_SIMILARITY, NO_SLOT};

/// Elements of a vector of 16 bytes.
pub(super) const LANES: usize = 8;
/// Units that share a key.
const TEAM: usize = 4;
/// Slots of a product: 16 rows, of which a unit has two, and 8 columns.
const ROWS: usize = 16;
const COLUMNS: usize = 8;
const PLANE: usize = 32;
const PLANES: usize = 8;
/// Units of a cube.
pub(super) const UNITS: usize = PLANES * PLANE;
/// The largest head dim for which registers hold a tile's keys.
const LARGEST: usize = 256;
/// Slots of the other list whose norms are computed at a time.
const CHUNK: usize = PLANES * COLUMNS;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    /// Vectors of a key.
    columns: usize,
    /// Tiles of rows that a plane holds.
    tiles: usize,
    earlier: bool,
}

impl Blueprint {
    /// Whether a unit's share of a key of 2-byte elements is whole vectors, and fits in registers.
    pub(super) fn serves(head_dim: usize) -> bool {
        head_dim.is_multiple_of(TEAM * LANES) && head_dim <= LARGEST
    }

    /// The configuration for keys in vectors of [`LANES`].
    pub(super) fn new(head_dim: usize, earlier: bool) -> Self {
        // As many tiles as registers hold besides the next keys.
        let tiles = if head_dim <= LARGEST / 2 { 2 } else { 1 };
        Self { columns: head_dim / LANES, tiles, earlier }
    }

    /// Slots of a cube that get partners.
    pub(super) fn rows(self) -> usize {
        PLANES * ROWS * self.tiles
    }

    /// Slots of a unit that get partners.
    fn own(self) -> usize {
        2 * self.tiles
    }
}

/// Finds partners by one cube for each [`Blueprint::rows`] slots of a row's list.
///
/// # Shapes
/// `keys` `[S, columns]`, in vectors.
#[cube(launch_unchecked)]
pub(super) fn nearest_tiles_kernel<F: Float, N: Size>(
    keys: &[Vector<F, N>],
    lists: &SlotLists,
    nearest: &mut Nearest,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let (columns, tiles) = comptime!((blueprint.columns, blueprint.tiles));
    let pieces = comptime!(columns / TEAM);
    let own = comptime!(blueprint.own());
    let held = comptime!(blueprint.rows());
    let (width, others) = (lists.width, lists.others);
    let parts = width.div_ceil(held);
    if CUBE_POS >= lists.rows * parts {
        terminate!();
    }
    let (row, first) = (CUBE_POS / parts, CUBE_POS % parts * held);
    let unit = UNIT_POS as usize;
    let (plane, lane) = (unit / PLANE, unit % PLANE);
    let (r, j) = (lane / TEAM, lane % TEAM);
    let count = lists.of_counts[row] as usize;
    let mut end = lists.among_counts[row] as usize;
    if comptime!(blueprint.earlier) {
        end = min(end, min(first + held, count));
    }
    if first >= count {
        end = 0usize;
    }

    let begin = first + plane * comptime!(ROWS * tiles) + r;
    let mut slots = Array::<i32>::new(own);
    let mut lengths = Array::<f32>::new(own);
    let mut a = Array::<Vector<F, N>>::new(comptime!(own * pieces));
    let mut best = Array::<f32>::new(own);
    let mut best_place = Array::<i32>::new(own);
    #[unroll]
    for i in 0..own {
        let index = begin + i * COLUMNS;
        let mut slot = 0i32;
        if index < count {
            slot = lists.of[row * width + index];
        }
        slots[i] = slot;
        #[unroll]
        for piece in 0..pieces {
            a[i * pieces + piece] = keys[slot as usize * columns + piece * TEAM + j];
        }
        lengths[i] = inverse_length(&a, i * pieces, pieces);
        best[i] = f32::new(NO_SIMILARITY);
        best_place[i] = i32::new(NO_SLOT as i64);
    }

    let def = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut chunk_slots = Shared::<[i32]>::new_slice(CHUNK);
    let mut chunk_lengths = Shared::<[f32]>::new_slice(CHUNK);
    let mut b = Array::<Vector<F, N>>::new(pieces);
    let mut base = 0usize;
    while base < end {
        // All units have compared the previous chunk.
        sync_cube();
        let index = base + plane * COLUMNS + r;
        let mut slot = 0i32;
        if index < end {
            slot = lists.among[row * others + index];
        }
        #[unroll]
        for piece in 0..pieces {
            b[piece] = keys[slot as usize * columns + piece * TEAM + j];
        }
        let length = inverse_length(&b, 0usize, pieces);
        if j == 0 {
            chunk_slots[plane * COLUMNS + r] = slot;
            chunk_lengths[plane * COLUMNS + r] = length;
        }
        sync_cube();
        for tile in 0..PLANES {
            let slot = chunk_slots[tile * COLUMNS + r] as usize;
            #[unroll]
            for piece in 0..pieces {
                b[piece] = keys[slot * columns + piece * TEAM + j];
            }
            let mut acc = Array::<Vector<f32, Const<2>>>::new(own);
            #[unroll]
            for i in 0..own {
                acc[i] = Vector::new(0.0f32);
            }
            #[unroll]
            for piece in 0..pieces {
                let other = Vector::<u32, Const<4>>::reinterpret(b[piece]);
                #[unroll]
                for half in 0..2usize {
                    let (left, right) = comptime!((2 * half, 2 * half + 1));
                    let mut column = Array::<Vector<F, Const<2>>>::new(2usize);
                    column[0] = Vector::reinterpret(other.extract(left));
                    column[1] = Vector::reinterpret(other.extract(right));
                    #[unroll]
                    for i in 0..tiles {
                        let low = Vector::<u32, Const<4>>::reinterpret(a[2 * i * pieces + piece]);
                        let high =
                            Vector::<u32, Const<4>>::reinterpret(a[(2 * i + 1) * pieces + piece]);
                        let mut rows = Array::<Vector<F, Const<2>>>::new(4usize);
                        rows[0] = Vector::reinterpret(low.extract(left));
                        rows[1] = Vector::reinterpret(high.extract(left));
                        rows[2] = Vector::reinterpret(low.extract(right));
                        rows[3] = Vector::reinterpret(high.extract(right));
                        let mut sums = Array::<Vector<f32, Const<2>>>::new(2usize);
                        sums[0] = acc[2 * i];
                        sums[1] = acc[comptime!(2 * i + 1)];
                        sums = def.execute(&rows, &column, &sums);
                        acc[2 * i] = sums[0];
                        acc[comptime!(2 * i + 1)] = sums[1];
                    }
                }
            }
            #[unroll]
            for e in 0..2usize {
                let within = tile * COLUMNS + 2 * j + e;
                let other = base + within;
                let (slot, length) = (chunk_slots[within], chunk_lengths[within]);
                #[unroll]
                for i in 0..own {
                    let mut fits = other < end && slot != slots[i];
                    if comptime!(blueprint.earlier) {
                        fits = fits && other < begin + i * COLUMNS;
                    }
                    // The norm of the own key is a common factor, so it is left out. Places ascend,
                    // so `>` keeps the first of equal places.
                    let likeness = acc[i].extract(e) * length;
                    let wins = fits && likeness > best[i];
                    best[i] = select(wins, likeness, best[i]);
                    best_place[i] = select(wins, i32::cast_from(other), best_place[i]);
                }
            }
        }
        base += CHUNK;
    }

    #[unroll]
    for i in 0..own {
        let (mut likeness, mut other) = (best[i], best_place[i]);
        #[unroll]
        for step in 0..2u32 {
            let theirs = plane_shuffle_xor(likeness, comptime!(1 << step));
            let index = plane_shuffle_xor(other, comptime!(1 << step));
            let wins = index >= 0 && (theirs > likeness || (theirs == likeness && index < other));
            likeness = select(wins, theirs, likeness);
            other = select(wins, index, other);
        }
        let index = begin + i * COLUMNS;
        if j == 0 && index < width {
            let found = index < count && other >= 0;
            nearest.places[row * width + index] = select(found, other, i32::new(NO_SLOT as i64));
            nearest.cosines[row * width + index] =
                select(found, likeness * lengths[i], f32::new(NO_COSINE));
        }
    }
}

/// One over the norm of the key whose vectors a team holds from `first` on; 0 for a key of zeros.
#[cube]
fn inverse_length<F: Float, N: Size>(
    vectors: &Array<Vector<F, N>>,
    #[comptime] first: usize,
    #[comptime] pieces: usize,
) -> f32 {
    let mut square = 0.0f32;
    #[unroll]
    for piece in 0..pieces {
        let vector = Vector::<f32, N>::cast_from(vectors[first + piece]);
        square += (vector * vector).vector_sum();
    }
    square += plane_shuffle_xor(square, 1u32);
    square += plane_shuffle_xor(square, 2u32);
    select(square > 0.0f32, 1.0f32 / square.sqrt(), 0.0f32)
}
