//! How the kernel for matrix instructions reads a tile: 16 slots, in the registers in which the
//! products take them.
//!
//! Lane `4 r + j` of a plane has the keys of slots `r` and `r + 8`, every fourth piece from `j` on,
//! and the values of slots `2 j`, `2 j + 1`, `2 j + 8` and `2 j + 9`, every eighth piece from `r`
//! on.

use cubecl::prelude::*;

use super::ViewKind;
use super::shared::{Seen, slot_at};
use crate::nvidia::read_fleeting;

/// Where in the range a tile's `u`-th logit of this lane is: `2 j`, `2 j + 1`, `2 j + 8`, `2 j +
/// 9`.
#[cube]
pub(crate) fn place_of(tile: usize, #[comptime] u: usize, j: usize) -> usize {
    tile + 2 * j + comptime!(u % 2 + (u / 2) * 8)
}

/// Reads a number a slot, where it is wanted; what is no slot gets the last one's.
#[cube]
pub(super) fn read_weights(
    weights: &[f32],
    own: &mut Array<f32>,
    at: &Array<usize>,
    slots: usize,
    #[comptime] wanted: bool,
) {
    if wanted {
        #[unroll]
        for u in 0..4usize {
            own[u] = weights[min(at[u], slots - 1)];
        }
    }
}

/// The `i`-th slot that a query attends to: where lists are `staged`, the cube has its part's in
/// shared memory.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn place(
    view: &[i32],
    places: &Shared<[f32]>,
    seen: &Seen,
    i: usize,
    first: usize,
    slots: usize,
    #[comptime] kind: ViewKind,
    #[comptime] staged: bool,
) -> usize {
    if staged {
        u32::reinterpret(places[i - first]) as usize
    } else {
        slot_at(view, seen, i, slots, kind)
    }
}

/// Reads a tile's keys: slots `r` and `r + 8`, every fourth piece from `j` on.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn read_keys(
    keys: &[Vector<u32, Const<4>>],
    view: &[i32],
    places: &Shared<[f32]>,
    k: &mut Array<Vector<u32, Const<4>>>,
    tile: usize,
    end: usize,
    seen: &Seen,
    first: usize,
    slots: usize,
    r: usize,
    j: usize,
    #[comptime] pieces: usize,
    #[comptime] kind: ViewKind,
    #[comptime] staged: bool,
) {
    #[unroll]
    for n in 0..2usize {
        let i = min(tile + 8 * n + r, end - 1);
        let slot = min(place(view, places, seen, i, first, slots, kind, staged), slots - 1);
        #[unroll]
        for piece in 0..pieces {
            k[n * pieces + piece] = keys[slot * comptime!(4 * pieces) + 4 * piece + j];
        }
    }
}

/// Reads a tile's values: slots `2 j`, `2 j + 1`, `2 j + 8` and `2 j + 9`, which are those of this
/// lane's logits too; `at` gets their slots, `slots` for none. `fleeting` values are the first to
/// leave the second cache.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn read_values<N: Size>(
    values: &[Vector<u32, N>],
    view: &[i32],
    places: &Shared<[f32]>,
    v: &mut Array<Vector<u32, N>>,
    at: &mut Array<usize>,
    tile: usize,
    end: usize,
    seen: &Seen,
    first: usize,
    slots: usize,
    r: usize,
    j: usize,
    #[comptime] blocks: usize,
    #[comptime] words: usize,
    #[comptime] fleeting: bool,
    #[comptime] kind: ViewKind,
    #[comptime] staged: bool,
) {
    #[unroll]
    for u in 0..4usize {
        let i = place_of(tile, u, j);
        let slot = place(view, places, seen, min(i, end - 1), first, slots, kind, staged);
        let row = min(slot, slots - 1);
        at[u] = select(i < end, slot, slots);
        #[unroll]
        for block in 0..blocks {
            let from = row * comptime!(8 * blocks) + 8 * block + r;
            let mut piece =
                if fleeting { read_fleeting(values, from, words) } else { values[from] };
            if comptime!(kind == ViewKind::List) {
                // What stands for an absent slot may hold anything, which 0 times NaN shows.
                if slot == slots {
                    piece = Vector::new(0u32);
                }
            }
            v[u * blocks + block] = piece;
        }
    }
}
