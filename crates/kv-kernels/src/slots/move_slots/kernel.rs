//! The kernels that move slots: between pools, within a pool (compaction), and into a victim's
//! place.

use cubecl::prelude::*;

use crate::components::barrier::sync_memory;
use crate::components::pool::PoolSlots;

/// Rows to copy, and where they go.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct CopiedRows {
    /// Rows of the source pool, `[count]`.
    rows: Box<[i32]>,
    /// Slots of the target pool, `[count]`, negative for none.
    slots: Box<[i32]>,
    count: usize,
}

/// How weights are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum CopiedWeights {
    /// The target pool has no weights.
    None,
    /// Weights are copied.
    Copied,
    /// Weights are set to 1, the weight of new tokens.
    Fresh,
}

/// Copies rows of one pool to slots of another. Each unit moves one vector of a key and of a value.
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

/// The slots of each range that are kept.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeptLists {
    /// First slots of ranges, `[B, Hkv]`.
    offsets: Box<[i32]>,
    /// Kept slots, counted from their range's first slot, ascending. The lists of all ranges follow
    /// one another.
    kept: Box<[i32]>,
    /// Where each range's list begins, `[B, Hkv]`.
    starts: Box<[i32]>,
    /// The length of each range's list, `[B, Hkv]`.
    counts: Box<[i32]>,
    /// `B * Hkv`
    total_kv_heads: usize,
    /// The longest list.
    most: usize,
}

/// Moves the kept slots of each range to its beginning, in place. One cube moves a range's keys,
/// another its values.
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
        // The keys' cube also moves positions and weights, and moves them first, since these short
        // reads would be waited for at the end.
        close_up::<i32>(&mut pool.positions, &lists.kept, &range, 1, cube);
        if weighted {
            close_up::<f32>(&mut pool.log_weights, &lists.kept, &range, 1, cube);
        }
        close_up::<Vector<E, N>>(&mut pool.keys, &lists.kept, &range, columns, cube);
    }
}

/// Comptime configuration of a compaction's cube.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CompactCube {
    pub(crate) units: usize,
    /// Vectors that a unit reads at once in a round.
    pub(crate) ahead: usize,
    /// Whether a cube's barrier leaves global memory unordered, so that a fence is needed.
    pub(crate) fenced: bool,
}

/// A range and its list of kept slots: `count` entries from `start` on, of the range that begins at
/// slot `offset`. `most` is the length of the longest list.
#[derive(CubeType)]
struct Kept {
    offset: usize,
    start: usize,
    count: usize,
    most: usize,
}

/// Moves the kept rows of a range to its beginning. A round is read while the round before it is
/// still in registers, and is written when all units have read it. Kept slots ascend, so that no
/// round reads what an earlier round has written.
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
    // Every cube runs equally many rounds: all units must meet every barrier.
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

/// Finds the slots of a round's rows.
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

/// Reads a round's rows.
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

/// Writes a round's rows.
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

/// The slots to drop.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct DroppedSlots {
    /// First slots of ranges, `[B, Hkv]`.
    offsets: Box<[i32]>,
    /// Live slots of ranges, `[B, Hkv]`; one less after whole slots are dropped.
    lengths: Box<[i32]>,
    /// Victims, `[B, Hkv]`, negative for none.
    victims: Box<[i32]>,
    /// 0 for a range that keeps its victim, `[B, Hkv]`.
    goes: Box<[i32]>,
    /// `B * Hkv`
    total_kv_heads: usize,
}

/// Which parts of a slot are dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct DropBlueprint {
    /// Whether slots have weights.
    pub(crate) weighted: bool,
    /// Whether the whole slot is dropped, and not its scalars alone.
    pub(crate) whole: bool,
}

/// Moves the last slot of each range into its victim's place, with one cube a range. Each of the
/// `scalars` is `[S]`.
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
        // All numbers are read before any is written, so that no read waits for another.
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
        // All units have read the length.
        sync_cube();
        if unit == 0 {
            dropped.lengths[kv_head] = length - 1;
        }
    }
}

/// Sets the numbers of every range's last slot, with one unit a range.
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
