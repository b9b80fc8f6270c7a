//! The CubeCL kernels: copies between pools, and compaction within one.

use cubecl::prelude::*;

use crate::barrier::sync_memory;

/// Vectors that a unit has in hand before it writes, in a compaction.
const AHEAD: usize = 4;

/// Row `rows[n]` of one pool to row `slots[n]` of another; a unit has a vector of a key and of a
/// value. Negative slots are skipped.
///
/// # Shapes
/// In vectors: `keys`, `values` `[S, columns]` of either pool.
#[cube(launch_unchecked)]
pub(crate) fn copy_kernel<E: Float, P: Float, N: Size>(
    keys: &[Vector<E, N>],
    values: &[Vector<E, N>],
    positions: &[i32],
    log_weights: &[f32],
    rows: &[i32],
    slots: &[i32],
    to_keys: &mut [Vector<P, N>],
    to_values: &mut [Vector<P, N>],
    to_positions: &mut [i32],
    to_log_weights: &mut [f32],
    count: usize,
    columns: usize,
    // Whether weights are copied, and whether they are set to those of new tokens.
    #[comptime] weighted: bool,
    #[comptime] fresh: bool,
    #[define(E)] _dtype: ElemType,
    #[define(P)] _to_dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < count * columns {
        let (n, column) = (at / columns, at % columns);
        let slot = slots[n];
        if slot >= 0 {
            let (row, slot) = (rows[n] as usize, slot as usize);
            let from = row * columns + column;
            let to = slot * columns + column;
            to_keys[to] = Vector::cast_from(keys[from]);
            to_values[to] = Vector::cast_from(values[from]);
            if column == 0 {
                to_positions[slot] = positions[row];
                if weighted {
                    to_log_weights[slot] = log_weights[row];
                }
                if fresh {
                    to_log_weights[slot] = 0.0f32;
                }
            }
        }
    }
}

/// Moves the kept slots of each range to its beginning, in place: a cube has a range's keys or its
/// values. What a cube writes, it has read before, since kept slots ascend.
///
/// # Shapes
/// In vectors: `keys`, `values` `[S, columns]`; `kept`, indices from the range's first
/// slot, those of pair `p` from `starts[p]` on, `counts[p]` of them.
#[cube(launch_unchecked)]
pub(crate) fn compact_kernel<E: Float, N: Size>(
    keys: &mut [Vector<E, N>],
    values: &mut [Vector<E, N>],
    positions: &mut [i32],
    log_weights: &mut [f32],
    offsets: &[i32],
    kept: &[i32],
    starts: &[i32],
    counts: &[i32],
    pairs: usize,
    most: usize,
    columns: usize,
    #[comptime] units: usize,
    #[comptime] weighted: bool,
    // Whether barriers for shared memory leave memory unordered.
    #[comptime] fenced: bool,
    #[define(E)] _dtype: ElemType,
) {
    if CUBE_POS >= 2 * pairs {
        terminate!();
    }
    let pair = CUBE_POS / 2;
    let of_values = CUBE_POS % 2 == 1;
    let unit = UNIT_POS as usize;
    let offset = offsets[pair] as usize;
    let start = starts[pair] as usize;
    let count = counts[pair] as usize;
    let total = count * columns;
    let mut first = 0usize;
    // Every cube takes as many turns, whatever is left for it: barriers must be met by all.
    for _ in 0..(most * columns).div_ceil(comptime!(units * AHEAD)) {
        let mut held = Array::<Vector<E, N>>::new(AHEAD);
        #[unroll]
        for i in 0..AHEAD {
            let at = first + i * units + unit;
            if at < total {
                let from = (offset + kept[start + at / columns] as usize) * columns + at % columns;
                if of_values {
                    held[i] = values[from];
                } else {
                    held[i] = keys[from];
                }
            }
        }
        sync_memory(fenced);
        #[unroll]
        for i in 0..AHEAD {
            let at = first + i * units + unit;
            if at < total {
                let to = (offset + at / columns) * columns + at % columns;
                if of_values {
                    values[to] = held[i];
                } else {
                    keys[to] = held[i];
                }
            }
        }
        first += comptime!(units * AHEAD);
    }
    // The numbers beside the slots go with the keys.
    let mut first = 0usize;
    for _ in 0..most.div_ceil(units) {
        let at = first + unit;
        let mine = !of_values && at < count;
        let mut position = i32::new(0);
        let mut log_weight = 0.0f32;
        if mine {
            let from = offset + kept[start + at] as usize;
            position = positions[from];
            if weighted {
                log_weight = log_weights[from];
            }
        }
        sync_memory(fenced);
        if mine {
            positions[offset + at] = position;
            if weighted {
                log_weights[offset + at] = log_weight;
            }
        }
        first += units;
    }
}

/// Moves the last slot of each range, of which a cube has one, into its victim's place.
///
/// # Shapes
/// In vectors: `keys`, `values` `[S, columns]`; `scalars` `[S]` each; `offsets`, `lengths`, `victims`, `goes`
/// `[pairs]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn drop_kernel<E: Float, N: Size>(
    keys: &mut [Vector<E, N>],
    values: &mut [Vector<E, N>],
    positions: &mut [i32],
    log_weights: &mut [f32],
    scalars: &mut Sequence<Box<[f32]>>,
    offsets: &[i32],
    lengths: &mut [i32],
    victims: &[i32],
    goes: &[i32],
    pairs: usize,
    columns: usize,
    #[comptime] weighted: bool,
    // Whether all of a slot goes, rather than its scalars alone.
    #[comptime] whole: bool,
    #[define(E)] _dtype: ElemType,
) {
    let pair = CUBE_POS;
    if pair >= pairs {
        terminate!();
    }
    let (length, slot) = (lengths[pair], victims[pair]);
    let last = (offsets[pair] + length - 1) as usize;
    if goes[pair] == 0 || slot < 0 || length <= 0 {
        terminate!();
    }
    let slot = slot as usize;
    let unit = UNIT_POS as usize;
    if unit == 0 {
        // All are read before any is written, so that none waits for another.
        let mut held = Array::<f32>::new(comptime!(scalars.len() + 1));
        #[unroll]
        for i in 0..scalars.len() {
            held[i] = scalars.index(i)[last];
        }
        let position = positions[last];
        if comptime!(whole && weighted) {
            held[comptime!(scalars.len())] = log_weights[last];
        }
        #[unroll]
        for i in 0..scalars.len() {
            scalars.index_mut(i)[slot] = held[i];
        }
        if comptime!(whole && weighted) {
            log_weights[slot] = held[comptime!(scalars.len())];
        }
        if whole {
            positions[slot] = position;
        }
    }
    if whole {
        let mut column = unit;
        while column < columns {
            let (key, value) = (keys[last * columns + column], values[last * columns + column]);
            keys[slot * columns + column] = key;
            values[slot * columns + column] = value;
            column += CUBE_DIM as usize;
        }
        // Everybody knows the length by then.
        sync_cube();
        if unit == 0 {
            lengths[pair] = length - 1;
        }
    }
}

/// Sets every range's last slot in pools of one number a slot, a unit a range.
#[cube(launch)]
pub(crate) fn reset_last_kernel(
    pools: &mut Sequence<Box<[f32]>>,
    initial: &Sequence<f32>,
    offsets: &[i32],
    lengths: &[i32],
    pairs: usize,
) {
    let pair = ABSOLUTE_POS;
    if pair < pairs && lengths[pair] > 0 {
        let last = (offsets[pair] + lengths[pair] - 1) as usize;
        #[unroll]
        for i in 0..pools.len() {
            let pool = pools.index_mut(i);
            pool[last] = *initial.index(i);
        }
    }
}
