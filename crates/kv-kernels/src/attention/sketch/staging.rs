//! Stages a range's sketch in shared memory, rounded and in an order that lanes read without bank
//! conflicts. Every token reads several of its entries, so that each entry is read many times.

use cubecl::prelude::*;

use super::blueprint::{Blueprint, WORDS};
use crate::components::ptx::shared_address;
use crate::sketch::count_sketch::kernel_args::Sketch;

/// Elements of a piece of a key; of a piece of a value; and of a vector of an entry in global
/// memory.
pub(super) const KEY_PIECE: usize = 8;
const VALUE_PIECE: usize = 4;
pub(super) const ENTRY: usize = 4;

/// Where a lane finds its columns of a range's entries.
#[derive(CubeType)]
pub(super) struct Columns {
    /// Addresses of its even and its odd pieces of a key, in bytes of shared memory.
    pub(super) keys: Array<u32>,
    /// Addresses of its first blocks of a value, in the lane's own order.
    pub(super) values: Array<u32>,
    /// The range's first entry in global memory.
    pub(super) first: usize,
    /// `r` of lane `4 r + j`.
    pub(super) r: usize,
    /// `j` of lane `4 r + j`.
    pub(super) j: usize,
}

/// How many orders lanes read the blocks of a value in: at most one for each of four lanes.
pub(super) fn orders(blocks: usize) -> usize {
    match blocks {
        _ if blocks.is_multiple_of(4) => 4,
        _ if blocks.is_multiple_of(2) => 2,
        _ => 1,
    }
}

/// Copies a range's entries to shared memory, rounded, and zeros after them. Returns where this
/// lane's columns are.
#[cube]
pub(super) fn stage<E: Float>(
    sketch: &Sketch,
    first: usize,
    entries: usize,
    r: usize,
    j: usize,
    #[comptime] blueprint: Blueprint,
) -> Columns {
    let (dim, room) = comptime!((blueprint.head_dim, blueprint.staged));
    let buckets = blueprint.sketch.buckets.comptime();
    let blocks = comptime!(blueprint.rows().blocks());
    let orders = comptime!(orders(blocks));
    let mut keys = Array::<u32>::new(2usize);
    let mut values = Array::<u32>::new(orders);
    if comptime!(room > 0) {
        let mut staged_keys =
            Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(room * dim / KEY_PIECE));
        let mut staged_values =
            Shared::<[Vector<u32, Const<WORDS>>]>::new_slice(comptime!(room * dim / VALUE_PIECE));
        let each = comptime!(dim / ENTRY);
        let rows = min(entries * buckets, room - 1);
        let mut i = UNIT_POS as usize;
        while i < rows * comptime!(dim / KEY_PIECE) {
            staged_keys[i] = key_piece::<E>(&sketch.keys, first * each + 2 * i);
            i += CUBE_DIM as usize;
        }
        i = UNIT_POS as usize;
        while i < rows * comptime!(dim / VALUE_PIECE) {
            let (row, piece) = (i / each, i % each);
            let to = row * each + place_of_piece(piece / 8, piece % 8, blocks);
            staged_values[to] = value_piece::<E>(&sketch.values, first * each + i);
            i += CUBE_DIM as usize;
        }
        // The last row is for tokens that are not in the sketch: entries themselves may hold
        // infinities.
        i = UNIT_POS as usize;
        while i < comptime!(dim / VALUE_PIECE) {
            staged_values[comptime!((room - 1) * dim / VALUE_PIECE) + i] = Vector::new(0u32);
            if i < comptime!(dim / KEY_PIECE) {
                staged_keys[comptime!((room - 1) * dim / KEY_PIECE) + i] = Vector::new(0u32);
            }
            i += CUBE_DIM as usize;
        }
        sync_cube();

        let of_keys = shared_address::<Vector<u32, Const<4>>>(staged_keys.as_ptr());
        let of_values = shared_address::<Vector<u32, Const<WORDS>>>(staged_values.as_ptr());
        let ahead = piece_ahead(r, blueprint);
        keys[0] = of_keys + 16 * (j + ahead) as u32;
        keys[1] = of_keys + 16 * j as u32 - 16 * ahead as u32;
        #[unroll]
        for step in 0..orders {
            let block = comptime!(step) ^ (j % orders);
            values[step] = of_values + 8 * place_of_piece(block, r, blocks) as u32;
        }
    }
    Columns { keys, values, first, r, j }
}

/// How far the piece that a lane reads first lies after its even piece. Lanes of odd rows swap
/// every two pieces of a key, so that two rows fill all banks at once.
#[cube]
pub(super) fn piece_ahead(r: usize, #[comptime] blueprint: Blueprint) -> usize {
    let mut ahead = 0usize.runtime();
    if comptime!(blueprint.rows().pieces().is_multiple_of(2)) {
        ahead = r % 2 * 4;
    }
    ahead
}

/// Where shared memory holds the piece of lanes `4 r` to `4 r + 3` in block `block` of a value.
/// Half a plane then reads pieces of different rows without conflict, if lanes `j` begin with
/// different blocks.
#[cube]
fn place_of_piece(block: usize, r: usize, #[comptime] blocks: usize) -> usize {
    r % 4 + 4 * block + comptime!(4 * blocks) * (r / 4)
}

/// A piece of an entry's key, rounded.
#[cube]
pub(super) fn key_piece<E: Float>(
    entries: &[Vector<f32, Const<ENTRY>>],
    from: usize,
) -> Vector<u32, Const<4>> {
    let mut piece = Vector::<u32, Const<4>>::empty();
    #[unroll]
    for half in 0..2usize {
        let words = value_piece::<E>(entries, from + half);
        piece.insert(comptime!(2 * half), words.extract(0usize));
        piece.insert(comptime!(2 * half + 1), words.extract(1usize));
    }
    piece
}

/// A piece of an entry's value, rounded.
#[cube]
pub(super) fn value_piece<E: Float>(
    entries: &[Vector<f32, Const<ENTRY>>],
    from: usize,
) -> Vector<u32, Const<WORDS>> {
    Vector::reinterpret(Vector::<E, Const<VALUE_PIECE>>::cast_from(entries[from]))
}
