//! The CubeCL kernels: a unit ranks a number by counting those that are better; a cube sums up a
//! row's groups.

use cubecl::prelude::*;

use crate::components::barrier::sync_memory;
use crate::components::sort_key::{index_key, not_below, sort_key};

/// Units of a cube.
pub(crate) const UNITS: usize = 256;
/// Numbers that each unit keeps for its cube at a time.
const EACH: usize = 4;
/// Numbers that a cube has in shared memory at a time.
const NUMBERS_PER_BLOCK: usize = UNITS * EACH;

/// What is written for a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RankOutput {
    /// The index of the number that has the rank; numbers are scores.
    Index,
    /// The priority of the token that the number belongs to, 0 for the first and −1 for the second;
    /// numbers are sums of groups, and merged tokens come behind all others.
    Priority,
}

/// Ranks the numbers of every row: a unit counts the numbers that are better than its own.
///
/// # Shapes
/// `numbers` `[rows, columns]`, of which a cube has `UNITS` of a row. With
/// [`RankOutput::Priority`], `ranked` and `parents` are read and `priorities` written, else
/// `indices` is written; tensors that are not used may be any.
#[cube(launch_unchecked)]
pub(crate) fn rankings_kernel(
    numbers: &[f32],
    ranked: &[i32],
    parents: &[i32],
    indices: &mut [i32],
    priorities: &mut [f32],
    rows: usize,
    columns: usize,
    #[comptime] output: RankOutput,
) {
    let cubes = columns.div_ceil(UNITS);
    if CUBE_POS >= rows * cubes {
        terminate!();
    }
    let start = CUBE_POS / cubes * columns;
    let unit = UNIT_POS as usize;
    let own = CUBE_POS % cubes * UNITS + unit;
    let mut high = 0u32;
    let mut is_merged = 0i32;
    if own < columns {
        high = sort_key(numbers[start + own]);
        if comptime!(output == RankOutput::Priority) {
            is_merged = select(parents[start + own] >= 0, i32::new(1), i32::new(0));
        }
    }
    let low = index_key(own);
    let mut others = Shared::<[u32]>::new_slice(NUMBERS_PER_BLOCK);
    let mut others_merged = Shared::<[i32]>::new_slice(NUMBERS_PER_BLOCK);
    let mut better = 0u32;
    let mut first = 0usize;
    while first < columns {
        sync_cube();
        #[unroll]
        for i in 0..EACH {
            let at = i * UNITS + unit;
            if first + at < columns {
                others[at] = sort_key(numbers[start + first + at]);
                if comptime!(output == RankOutput::Priority) {
                    let parents = parents[start + first + at];
                    others_merged[at] = select(parents >= 0, i32::new(1), i32::new(0));
                }
            }
        }
        sync_cube();
        for at in 0..min(columns - first, NUMBERS_PER_BLOCK) {
            let mut wins = !not_below(high, low, others[at], index_key(first + at));
            if comptime!(output == RankOutput::Priority) {
                wins = others_merged[at] < is_merged || (others_merged[at] == is_merged && wins);
            }
            better += select(wins, 1u32, 0u32);
        }
        first += NUMBERS_PER_BLOCK;
    }
    if own < columns {
        if comptime!(output == RankOutput::Priority) {
            priorities[start + ranked[start + own] as usize] = -f32::cast_from(better);
        } else {
            indices[start + better as usize] = i32::cast_from(own);
        }
    }
}

/// Sums up the groups of every row, one cube a row: from the lowest rank up, each token adds its
/// sum to its parent's.
///
/// # Shapes
/// All `[rows, columns]`; `parents` are the leaders that tokens are merged into, −1 for none.
#[cube(launch_unchecked)]
pub(crate) fn group_sums_kernel(
    scores: &[f32],
    ranked: &[i32],
    leaders: &[i32],
    parents: &mut [i32],
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
    let mut rank = unit;
    while rank < columns {
        let score = scores[start + ranked[start + rank] as usize];
        sums[start + rank] = score;
        // Infinities and NaN join nobody.
        let finite = u32::reinterpret(score) & 0x7f80_0000u32 != 0x7f80_0000u32;
        parents[start + rank] = select(finite, leaders[start + rank], i32::new(-1));
        rank += UNITS;
    }
    let mut own = Shared::<[f32]>::new_slice(NUMBERS_PER_BLOCK);
    let mut to = Shared::<[i32]>::new_slice(NUMBERS_PER_BLOCK);
    let tiles = columns.div_ceil(NUMBERS_PER_BLOCK);
    for tile in 0..tiles {
        let first = (tiles - 1 - tile) * NUMBERS_PER_BLOCK;
        // Tiles behind this one have handed on what they have.
        sync_memory(fenced);
        #[unroll]
        for i in 0..EACH {
            let at = i * UNITS + unit;
            if first + at < columns {
                to[at] = parents[start + first + at];
                own[at] = sums[start + first + at];
            }
        }
        sync_cube();
        if unit == 0 {
            let count = min(columns - first, NUMBERS_PER_BLOCK);
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
