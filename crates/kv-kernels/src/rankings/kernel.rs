//! The CubeCL kernels: a unit ranks a number by counting those that are better; a cube sums up a
//! row's groups.

use cubecl::prelude::*;

use crate::barrier::sync_memory;
use crate::select::{from, high_of, low_of};

/// Units of a cube.
pub(crate) const UNITS: usize = 256;
/// Numbers that each unit keeps for its cube at a time.
const EACH: usize = 4;
/// Places that a cube has in shared memory at a time.
const TILE: usize = UNITS * EACH;

/// What a rank says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Says {
    /// Which index has it, of numbers that are scores.
    Index,
    /// How late its number's token is chosen, of the sums of ranked ones: those that have joined
    /// others are behind all that have not.
    Turn,
}

/// # Shapes
/// `numbers` `[rows, columns]`, of which a cube has `UNITS` of a row. For [`Says::Turn`] `ranked`
/// and `joins`, too, and `turns` are written, else `indices`; what is not used is any tensor.
#[cube(launch_unchecked)]
pub(crate) fn rankings_kernel(
    numbers: &[f32],
    ranked: &[i32],
    joins: &[i32],
    indices: &mut [i32],
    turns: &mut [f32],
    rows: usize,
    columns: usize,
    #[comptime] says: Says,
) {
    let cubes = columns.div_ceil(UNITS);
    if CUBE_POS >= rows * cubes {
        terminate!();
    }
    let start = CUBE_POS / cubes * columns;
    let unit = UNIT_POS as usize;
    let own = CUBE_POS % cubes * UNITS + unit;
    let mut high = 0u32;
    let mut behind = 0i32;
    if own < columns {
        high = high_of(numbers[start + own]);
        if comptime!(says == Says::Turn) {
            behind = select(joins[start + own] >= 0, i32::new(1), i32::new(0));
        }
    }
    let low = low_of(own);
    let mut others = Shared::<[u32]>::new_slice(TILE);
    let mut others_behind = Shared::<[i32]>::new_slice(TILE);
    let mut better = 0u32;
    let mut first = 0usize;
    while first < columns {
        sync_cube();
        #[unroll]
        for i in 0..EACH {
            let at = i * UNITS + unit;
            if first + at < columns {
                others[at] = high_of(numbers[start + first + at]);
                if comptime!(says == Says::Turn) {
                    let joins = joins[start + first + at];
                    others_behind[at] = select(joins >= 0, i32::new(1), i32::new(0));
                }
            }
        }
        sync_cube();
        for at in 0..min(columns - first, TILE) {
            let mut wins = !from(high, low, others[at], low_of(first + at));
            if comptime!(says == Says::Turn) {
                wins = others_behind[at] < behind || (others_behind[at] == behind && wins);
            }
            better += select(wins, 1u32, 0u32);
        }
        first += TILE;
    }
    if own < columns {
        if comptime!(says == Says::Turn) {
            turns[start + ranked[start + own] as usize] = -f32::cast_from(better);
        } else {
            indices[start + better as usize] = i32::cast_from(own);
        }
    }
}

/// One unit of a row's cube makes the sums, of what all have brought near.
///
/// # Shapes
/// All `[rows, columns]`; `joins` are the leaders that are really joined, −1 for none.
#[cube(launch_unchecked)]
pub(crate) fn joined_sums_kernel(
    scores: &[f32],
    ranked: &[i32],
    leaders: &[i32],
    joins: &mut [i32],
    sums: &mut [f32],
    rows: usize,
    columns: usize,
    // Whether barriers for shared memory leave memory unordered.
    #[comptime] fenced: bool,
) {
    let row = CUBE_POS;
    if row >= rows {
        terminate!();
    }
    let start = row * columns;
    let unit = UNIT_POS as usize;
    let mut place = unit;
    while place < columns {
        let score = scores[start + ranked[start + place] as usize];
        sums[start + place] = score;
        // Infinities and NaN join nobody.
        let finite = u32::reinterpret(score) & 0x7f80_0000u32 != 0x7f80_0000u32;
        joins[start + place] = select(finite, leaders[start + place], i32::new(-1));
        place += UNITS;
    }
    let mut own = Shared::<[f32]>::new_slice(TILE);
    let mut to = Shared::<[i32]>::new_slice(TILE);
    let tiles = columns.div_ceil(TILE);
    for tile in 0..tiles {
        let first = (tiles - 1 - tile) * TILE;
        // Tiles behind this one have handed on what they have.
        sync_memory(fenced);
        #[unroll]
        for i in 0..EACH {
            let at = i * UNITS + unit;
            if first + at < columns {
                to[at] = joins[start + first + at];
                own[at] = sums[start + first + at];
            }
        }
        sync_cube();
        if unit == 0 {
            let count = min(columns - first, TILE);
            for i in 0..count {
                let at = count - 1 - i;
                let leader = to[at];
                if leader >= 0 {
                    let leader = leader as usize;
                    let more = select(own[at] > 0.0f32, own[at], 0.0f32);
                    if leader >= first {
                        own[leader - first] += more;
                    } else {
                        sums[start + leader] += more;
                    }
                }
            }
        }
        sync_cube();
        #[unroll]
        for i in 0..EACH {
            let at = i * UNITS + unit;
            if first + at < columns {
                sums[start + first + at] = own[at];
            }
        }
    }
}
