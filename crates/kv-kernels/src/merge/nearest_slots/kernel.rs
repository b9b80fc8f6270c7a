//! The portable kernel of `nearest_slots`: each cube compares a tile of one list with all tiles of
//! the other list, with products in registers.

use cubecl::prelude::*;

use super::kernel_args::{Nearest, SlotLists};
use crate::components::sentinels::{NO_COSINE, NO_SLOT};

/// Slots of a tile, in both lists.
pub(crate) const KEYS_PER_BLOCK: usize = 64;
/// Units along each side of a cube's square. Each unit has `EACH` slots of either list.
const SIDE: usize = 16;
const EACH: usize = KEYS_PER_BLOCK / SIDE;
/// Units of a cube.
pub(crate) const UNITS: usize = SIDE * SIDE;
/// Columns of the tiles' keys in shared memory at a time.
const DEPTH: usize = 16;
/// The distance between rows of these columns, without bank conflicts.
const PITCH: usize = DEPTH + 1;

/// Finds partners by one cube for each tile of a row's list. `keys` `[S, D]`.
#[cube(launch_unchecked)]
#[allow(clippy::collapsible_if, reason = "kernels evaluate both sides of `&&`")]
pub(super) fn nearest_slots_kernel<F: Float>(
    keys: &[F],
    lists: &SlotLists,
    nearest: &mut Nearest,
    #[comptime] head_dim: usize,
    #[comptime] earlier: bool,
    #[define(F)] _dtype: ElemType,
) {
    let (width, others) = (lists.width, lists.others);
    let tiles = width.div_ceil(KEYS_PER_BLOCK);
    if CUBE_POS >= lists.rows * tiles {
        terminate!();
    }
    let (row, first) = (CUBE_POS / tiles, CUBE_POS % tiles * KEYS_PER_BLOCK);
    let unit = UNIT_POS as usize;
    let (down, across) = (unit / SIDE, unit % SIDE);
    let count = lists.of_counts[row] as usize;
    let mut end = lists.among_counts[row] as usize;
    if earlier {
        end = min(end, min(first + KEYS_PER_BLOCK, count));
    }

    let mut left = Shared::<[f32]>::new_slice(comptime!(KEYS_PER_BLOCK * PITCH));
    let mut right = Shared::<[f32]>::new_slice(comptime!(KEYS_PER_BLOCK * PITCH));
    // Squared norms of both tiles' keys. Each of the first `2 KEYS_PER_BLOCK` units has one.
    let mut squares = Shared::<[f32]>::new_slice(comptime!(2 * KEYS_PER_BLOCK));
    let mut best = Array::<f32>::new(EACH);
    let mut best_place = Array::<i32>::new(EACH);
    #[unroll]
    for i in 0..EACH {
        best[i] = f32::new(NO_COSINE);
        best_place[i] = i32::new(NO_SLOT as i64);
    }

    let mut base = 0usize;
    while base < end {
        let mut dots = Array::<f32>::new(comptime!(EACH * EACH));
        #[unroll]
        for i in 0..comptime!(EACH * EACH) {
            dots[i] = 0.0f32;
        }
        let mut square = 0.0f32;
        let mut column = 0usize;
        while column < head_dim {
            sync_cube();
            #[unroll]
            for i in 0..comptime!(KEYS_PER_BLOCK * DEPTH / UNITS) {
                let at = i * UNITS + unit;
                let (slot, depth) = (at / DEPTH, at % DEPTH);
                let mut own = 0.0f32;
                let mut other = 0.0f32;
                if column + depth < head_dim {
                    if first + slot < count {
                        let from = lists.of[row * width + first + slot] as usize;
                        own = f32::cast_from(keys[from * head_dim + column + depth]);
                    }
                    if base + slot < end {
                        let from = lists.among[row * others + base + slot] as usize;
                        other = f32::cast_from(keys[from * head_dim + column + depth]);
                    }
                }
                left[slot * PITCH + depth] = own;
                right[slot * PITCH + depth] = other;
            }
            sync_cube();
            if unit < KEYS_PER_BLOCK {
                #[unroll]
                for depth in 0..DEPTH {
                    let x = left[unit * PITCH + depth];
                    square += x * x;
                }
            } else if unit < 2 * KEYS_PER_BLOCK {
                #[unroll]
                for depth in 0..DEPTH {
                    let x = right[(unit - KEYS_PER_BLOCK) * PITCH + depth];
                    square += x * x;
                }
            }
            #[unroll]
            for depth in 0..DEPTH {
                let mut a = Array::<f32>::new(EACH);
                let mut b = Array::<f32>::new(EACH);
                #[unroll]
                for i in 0..EACH {
                    a[i] = left[(i * SIDE + down) * PITCH + depth];
                    b[i] = right[(i * SIDE + across) * PITCH + depth];
                }
                #[unroll]
                for i in 0..EACH {
                    #[unroll]
                    for j in 0..EACH {
                        dots[i * EACH + j] += a[i] * b[j];
                    }
                }
            }
            column += DEPTH;
        }
        if unit < 2 * KEYS_PER_BLOCK {
            squares[unit] = square;
        }
        sync_cube();
        #[unroll]
        for i in 0..EACH {
            let own = i * SIDE + down;
            let index = first + own;
            #[unroll]
            for j in 0..EACH {
                let other = base + j * SIDE + across;
                let norms =
                    squares[own].sqrt() * squares[KEYS_PER_BLOCK + j * SIDE + across].sqrt();
                let cosine = select(norms > 0.0f32, dots[i * EACH + j] / norms, 0.0f32);
                let mut fits = other < end && index < count;
                if earlier {
                    fits = fits && other < index;
                }
                // Places ascend, so `>` keeps the first of equal places.
                if fits && cosine > best[i] {
                    if lists.among[row * others + other] != lists.of[row * width + index] {
                        best[i] = cosine;
                        best_place[i] = i32::cast_from(other);
                    }
                }
            }
        }
        base += KEYS_PER_BLOCK;
    }

    // Units side by side hold candidates for the same slots.
    let mut values = Shared::<[f32]>::new_slice(comptime!(UNITS * EACH));
    let mut found = Shared::<[i32]>::new_slice(comptime!(UNITS * EACH));
    #[unroll]
    for i in 0..EACH {
        values[(i * SIDE + down) * SIDE + across] = best[i];
        found[(i * SIDE + down) * SIDE + across] = best_place[i];
    }
    sync_cube();
    if unit < KEYS_PER_BLOCK && first + unit < width {
        let mut value = f32::new(NO_COSINE);
        let mut index = i32::new(NO_SLOT as i64);
        for other in 0..SIDE {
            let at = unit * SIDE + other;
            let wins =
                values[at] > value || (values[at] == value && found[at] >= 0 && found[at] < index);
            if wins {
                value = values[at];
                index = found[at];
            }
        }
        nearest.places[row * width + first + unit] = index;
        nearest.cosines[row * width + first + unit] = value;
    }
}
