//! The CubeCL kernels: copies between pools, and compaction within one.

use cubecl::prelude::*;

use crate::components::barrier::sync_memory;
use crate::components::pool::PoolSlots;

/// Which rows of a pool go where.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct CopiedRows {
    /// Rows of the pool that is read, `[count]`.
    rows: Box<[i32]>,
    /// Slots of the one that is written, `[count]`, negative for none.
    slots: Box<[i32]>,
    count: usize,
}

/// What becomes of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum CopiedWeights {
    /// The pool that is written has none.
    None,
    /// They are copied.
    Copied,
    /// They are set to those of new tokens.
    Fresh,
}

/// Copies rows of one pool to slots of another; a unit has a vector of a key and of a value.
#[cube(launch_unchecked)]
pub(crate) fn copy_kernel<E: Float, P: Float, N: Size>(
    from: &PoolSlots<Vector<E, N>>,
    to: &mut PoolSlots<Vector<P, N>>,
    copied: &CopiedRows,
    columns: usize,
    #[comptime] weights: CopiedWeights,
    #[define(E)] _dtype: ElemType,
    #[define(P)] _to_dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < copied.count * columns {
        let (n, column) = (at / columns, at % columns);
        let slot = copied.slots[n];
        if slot >= 0 {
            let (row, slot) = (copied.rows[n] as usize, slot as usize);
            let read = row * columns + column;
            let written = slot * columns + column;
            to.keys[written] = Vector::cast_from(from.keys[read]);
            to.values[written] = Vector::cast_from(from.values[read]);
            if column == 0 {
                to.positions[slot] = from.positions[row];
                if comptime!(weights == CopiedWeights::Copied) {
                    to.log_weights[slot] = from.log_weights[row];
                }
                if comptime!(weights == CopiedWeights::Fresh) {
                    to.log_weights[slot] = 0.0f32;
                }
            }
        }
    }
}

/// The slots of each range that stay.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeptLists {
    /// First slots of ranges, `[B, Hkv]`.
    offsets: Box<[i32]>,
    /// Places in the ranges, ascending, those of all ranges one after another.
    kept: Box<[i32]>,
    /// Where those of a range begin, `[B, Hkv]`.
    starts: Box<[i32]>,
    /// How many they are, `[B, Hkv]`.
    counts: Box<[i32]>,
    /// `B * Hkv`
    total_kv_heads: usize,
    /// The most of any range.
    most: usize,
}

/// Moves the kept slots of each range to its beginning, in place: a cube has a range's keys or its
/// values.
#[cube(launch_unchecked)]
pub(crate) fn compact_kernel<E: Float, N: Size>(
    pool: &mut PoolSlots<Vector<E, N>>,
    lists: &KeptLists,
    columns: usize,
    #[comptime] cube: CompactCube,
    #[comptime] weighted: bool,
    #[define(E)] _dtype: ElemType,
) {
    if CUBE_POS >= 2 * lists.total_kv_heads {
        terminate!();
    }
    let kv_head = CUBE_POS / 2;
    let range = Kept {
        offset: lists.offsets[kv_head] as usize,
        start: lists.starts[kv_head] as usize,
        count: lists.counts[kv_head] as usize,
        most: lists.most,
    };
    if CUBE_POS % 2 == 1 {
        close_up::<Vector<E, N>>(&mut pool.values, &lists.kept, &range, columns, cube);
    } else {
        // The numbers beside the slots go with the keys, and before them: nobody is to wait for
        // them in the end.
        close_up::<i32>(&mut pool.positions, &lists.kept, &range, 1, cube);
        if weighted {
            close_up::<f32>(&mut pool.log_weights, &lists.kept, &range, 1, cube);
        }
        close_up::<Vector<E, N>>(&mut pool.keys, &lists.kept, &range, columns, cube);
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

/// The slots that go.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct DroppedSlots {
    /// First slots of ranges, `[B, Hkv]`.
    offsets: Box<[i32]>,
    /// Live slots of ranges, `[B, Hkv]`, one less where all of a slot goes.
    lengths: Box<[i32]>,
    /// `[B, Hkv]`, negative for none.
    victims: Box<[i32]>,
    /// 0 where the victim stays, `[B, Hkv]`.
    goes: Box<[i32]>,
    /// `B * Hkv`
    total_kv_heads: usize,
}

/// What of a slot goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct DropBlueprint {
    /// Whether slots have weights.
    pub(crate) weighted: bool,
    /// Whether all of a slot goes, rather than its scalars alone.
    pub(crate) whole: bool,
}

/// Moves the last slot of each range, of which a cube has one, into its victim's place. `scalars`
/// are `[S]` each.
#[cube(launch_unchecked)]
pub(crate) fn drop_kernel<E: Float, N: Size>(
    pool: &mut PoolSlots<Vector<E, N>>,
    scalars: &mut Sequence<Box<[f32]>>,
    dropped: &mut DroppedSlots,
    columns: usize,
    #[comptime] blueprint: DropBlueprint,
    #[define(E)] _dtype: ElemType,
) {
    let DropBlueprint { weighted, whole } = blueprint;
    let kv_head = CUBE_POS;
    if kv_head >= dropped.total_kv_heads {
        terminate!();
    }
    let (length, slot) = (dropped.lengths[kv_head], dropped.victims[kv_head]);
    let last = (dropped.offsets[kv_head] + length - 1) as usize;
    if dropped.goes[kv_head] == 0 || slot < 0 || length <= 0 {
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
        let position = pool.positions[last];
        if comptime!(whole && weighted) {
            held[comptime!(scalars.len())] = pool.log_weights[last];
        }
        #[unroll]
        for i in 0..scalars.len() {
            scalars.index_mut(i)[slot] = held[i];
        }
        if comptime!(whole && weighted) {
            pool.log_weights[slot] = held[comptime!(scalars.len())];
        }
        if whole {
            pool.positions[slot] = position;
        }
    }
    if whole {
        let mut column = unit;
        while column < columns {
            let from = last * columns + column;
            let (key, value) = (pool.keys[from], pool.values[from]);
            pool.keys[slot * columns + column] = key;
            pool.values[slot * columns + column] = value;
            column += CUBE_DIM as usize;
        }
        // Everybody knows the length by then.
        sync_cube();
        if unit == 0 {
            dropped.lengths[kv_head] = length - 1;
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
