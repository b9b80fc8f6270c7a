//! The CubeCL kernels: copies between pools, and compaction within one.

use cubecl::prelude::*;

use crate::components::barrier::sync_memory;

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
/// values.
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
    total_kv_heads: usize,
    most: usize,
    columns: usize,
    #[comptime] cube: CompactCube,
    #[comptime] weighted: bool,
    #[define(E)] _dtype: ElemType,
) {
    if CUBE_POS >= 2 * total_kv_heads {
        terminate!();
    }
    let kv_head = CUBE_POS / 2;
    let range = Kept {
        offset: offsets[kv_head] as usize,
        start: starts[kv_head] as usize,
        count: counts[kv_head] as usize,
        most,
    };
    if CUBE_POS % 2 == 1 {
        close_up::<Vector<E, N>>(values, kept, &range, columns, cube);
    } else {
        // The numbers beside the slots go with the keys, and before them: nobody is to wait for
        // them in the end.
        close_up::<i32>(positions, kept, &range, 1, cube);
        if weighted {
            close_up::<f32>(log_weights, kept, &range, 1, cube);
        }
        close_up::<Vector<E, N>>(keys, kept, &range, columns, cube);
    }
}

/// What a compaction's cubes are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CompactCube {
    pub(crate) units: usize,
    /// Rows' vectors that a unit reads at once, a round.
    pub(crate) ahead: usize,
    /// Whether barriers for shared memory leave memory unordered.
    pub(crate) fenced: bool,
}

/// The slots of a range that stay: `count` indices from `start` on, of slots from `offset` on;
/// `most`, of any range.
#[derive(CubeType)]
struct Kept {
    offset: usize,
    start: usize,
    count: usize,
    most: usize,
}

/// Moves the kept rows of a pool to their range's beginning. A round is read while the one before
/// it is in hand, and written when all units have read it: kept slots ascend, so that no round
/// reads what an earlier one has written.
#[cube]
fn close_up<T: CubePrimitive>(
    pool: &mut [T],
    kept: &[i32],
    range: &Kept,
    columns: usize,
    #[comptime] cube: CompactCube,
) {
    let mut slots = Array::<i32>::new(cube.ahead);
    let mut one = Array::<T>::new(cube.ahead);
    let mut other = Array::<T>::new(cube.ahead);
    let round = comptime!(cube.units * cube.ahead).runtime();
    find(&mut slots, kept, range, columns, 0, cube);
    take::<T>(&mut one, &pool[..], &slots, range, columns, 0, cube);
    find(&mut slots, kept, range, columns, round, cube);
    let mut first = 0usize;
    // Every cube takes as many turns, whatever is left for it: barriers must be met by all.
    for _ in 0..(range.most * columns).div_ceil(2 * round) {
        take::<T>(&mut other, &pool[..], &slots, range, columns, first + round, cube);
        find(&mut slots, kept, range, columns, first + 2 * round, cube);
        sync_memory(cube.fenced);
        put::<T>(pool, &one, range, columns, first, cube);
        take::<T>(&mut one, &pool[..], &slots, range, columns, first + 2 * round, cube);
        find(&mut slots, kept, range, columns, first + 3 * round, cube);
        sync_memory(cube.fenced);
        put::<T>(pool, &other, range, columns, first + round, cube);
        first += 2 * round;
    }
}

/// The slots of a round's rows.
#[cube]
fn find(
    slots: &mut Array<i32>,
    kept: &[i32],
    range: &Kept,
    columns: usize,
    first: usize,
    #[comptime] cube: CompactCube,
) {
    #[unroll]
    for i in 0..cube.ahead {
        let at = first + comptime!(i * cube.units) + UNIT_POS as usize;
        if at < range.count * columns {
            slots[i] = kept[range.start + at / columns];
        }
    }
}

/// A round's rows, read.
#[cube]
fn take<T: CubePrimitive>(
    held: &mut Array<T>,
    pool: &[T],
    slots: &Array<i32>,
    range: &Kept,
    columns: usize,
    first: usize,
    #[comptime] cube: CompactCube,
) {
    #[unroll]
    for i in 0..cube.ahead {
        let at = first + comptime!(i * cube.units) + UNIT_POS as usize;
        if at < range.count * columns {
            held[i] = pool[(range.offset + slots[i] as usize) * columns + at % columns];
        }
    }
}

/// A round's rows, written.
#[cube]
fn put<T: CubePrimitive>(
    pool: &mut [T],
    held: &Array<T>,
    range: &Kept,
    columns: usize,
    first: usize,
    #[comptime] cube: CompactCube,
) {
    #[unroll]
    for i in 0..cube.ahead {
        let at = first + comptime!(i * cube.units) + UNIT_POS as usize;
        if at < range.count * columns {
            pool[range.offset * columns + at] = held[i];
        }
    }
}

/// Moves the last slot of each range, of which a cube has one, into its victim's place.
///
/// # Shapes
/// In vectors: `keys`, `values` `[S, columns]`; `scalars` `[S]` each; `offsets`, `lengths`,
/// `victims`, `goes` `[total_kv_heads]`.
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
    total_kv_heads: usize,
    columns: usize,
    #[comptime] weighted: bool,
    // Whether all of a slot goes, rather than its scalars alone.
    #[comptime] whole: bool,
    #[define(E)] _dtype: ElemType,
) {
    let kv_head = CUBE_POS;
    if kv_head >= total_kv_heads {
        terminate!();
    }
    let (length, slot) = (lengths[kv_head], victims[kv_head]);
    let last = (offsets[kv_head] + length - 1) as usize;
    if goes[kv_head] == 0 || slot < 0 || length <= 0 {
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
            lengths[kv_head] = length - 1;
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
    total_kv_heads: usize,
) {
    let kv_head = ABSOLUTE_POS;
    if kv_head < total_kv_heads && lengths[kv_head] > 0 {
        let last = (offsets[kv_head] + lengths[kv_head] - 1) as usize;
        #[unroll]
        for i in 0..pools.len() {
            let pool = pools.index_mut(i);
            pool[last] = *initial.index(i);
        }
    }
}
