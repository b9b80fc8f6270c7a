//! The operands of matrix instructions: how a plane loads a tile of 16 slots into the registers in
//! which the products take them.
//!
//! Lane `4 r + j` of a plane has the keys of slots `r` and `r + 8`, every fourth piece from `j` on,
//! and the values of slots `2 j`, `2 j + 1`, `2 j + 8` and `2 j + 9`, every eighth piece from `r`
//! on.

use cubecl::prelude::*;

use super::ViewKind;
use super::slot_indexer::SlotIndexer;
use crate::components::ptx::read_fleeting;

/// The index in the range of the `u`-th logit of a lane in a tile: `2 j`, `2 j + 1`, `2 j + 8`, `2
/// j + 9` from the tile's first slot on.
#[cube]
pub(crate) fn key_index(tile: usize, #[comptime] u: usize, j: usize) -> usize {
    tile + 2 * j + comptime!(u % 2 + (u / 2) * 8)
}

/// Reads the weights of the slots `at`, where they are wanted; indices of no slot get the last
/// slot's.
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

/// The `i`-th slot that a query attends to. Where slots are `staged`, those of the cube's part are
/// in shared memory.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn staged_slot(
    view: &[i32],
    staged_slots: &Shared<[f32]>,
    indexer: &SlotIndexer,
    i: usize,
    first: usize,
    slots: usize,
    #[comptime] kind: ViewKind,
    #[comptime] staged: bool,
) -> usize {
    if staged {
        u32::reinterpret(staged_slots[i - first]) as usize
    } else {
        indexer.slot(view, i, slots, kind)
    }
}

/// Reads a tile's keys: slots `r` and `r + 8`, every fourth piece from `j` on.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn read_keys(
    keys: &[Vector<u32, Const<4>>],
    view: &[i32],
    staged_slots: &Shared<[f32]>,
    k: &mut Array<Vector<u32, Const<4>>>,
    tile: usize,
    end: usize,
    indexer: &SlotIndexer,
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
        let slot =
            min(staged_slot(view, staged_slots, indexer, i, first, slots, kind, staged), slots - 1);
        #[unroll]
        for piece in 0..pieces {
            k[n * pieces + piece] = keys[slot * comptime!(4 * pieces) + 4 * piece + j];
        }
    }
}

/// Reads a tile's values: slots `2 j`, `2 j + 1`, `2 j + 8` and `2 j + 9`, to which this lane's
/// logits belong, too; `at` gets their slots, `slots` for none. `fleeting` values are the first to
/// leave the L2 cache.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn read_values<N: Size>(
    values: &[Vector<u32, N>],
    view: &[i32],
    staged_slots: &Shared<[f32]>,
    v: &mut Array<Vector<u32, N>>,
    at: &mut Array<usize>,
    tile: usize,
    end: usize,
    indexer: &SlotIndexer,
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
        let i = key_index(tile, u, j);
        let slot =
            staged_slot(view, staged_slots, indexer, min(i, end - 1), first, slots, kind, staged);
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
