//! The kernels of rankings: a unit ranks a number by counting the better ones, and a cube sums the
//! groups of a row. Nothing is sorted.

use cubecl::prelude::*;

use crate::components::barrier::sync_memory;
use crate::components::sentinels::NO_SLOT;
use crate::components::sort_key::{index_key, not_below, sort_key};

/// Units of a cube.
pub(crate) const UNITS: usize = 256;
/// Numbers that each unit loads into shared memory at a time.
const EACH: usize = 4;
/// Numbers that a cube holds in shared memory at a time.
const NUMBERS_PER_BLOCK: usize = UNITS * EACH;

/// The result that is written for each number's rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RankOutput {
    /// At the place of the rank, the number's index. The numbers are scores.
    Index,
    /// At the token's place, its priority: 0 for the first rank, −1 for the second. The numbers are
    /// sums of groups, and merged tokens rank after all others.
    Priority,
}

/// The rows of numbers to rank.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RankedNumbers {
    /// `[rows, columns]`
    numbers: Box<[f32]>,
    /// Tokens by rank, `[rows, columns]`, for [`RankOutput::Priority`].
    ranked: Box<[i32]>,
    /// Indices into `ranked` of the tokens that others are merged into, `[rows, columns]`,
    /// [`NO_SLOT`] for none; for [`RankOutput::Priority`].
    parents: Box<[i32]>,
    rows: usize,
    columns: usize,
}

/// The results. The tensor of the other [`RankOutput`] may be any tensor.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Ranks {
    /// `[rows, columns]`, for [`RankOutput::Index`].
    indices: Box<[i32]>,
    /// `[rows, columns]`, for [`RankOutput::Priority`].
    priorities: Box<[f32]>,
}

/// Ranks the numbers of every row. Each cube ranks `UNITS` numbers of a row, and each unit counts
/// the numbers that are better than its own.
#[cube(launch_unchecked)]
pub(crate) fn rankings_kernel(
    given: &RankedNumbers,
    ranks: &mut Ranks,
    #[comptime] output: RankOutput,
) {
    let columns = given.columns;
    let cubes = columns.div_ceil(UNITS);
    if CUBE_POS >= given.rows * cubes {
        terminate!();
    }
    let start = CUBE_POS / cubes * columns;
    let unit = UNIT_POS as usize;
    let own = CUBE_POS % cubes * UNITS + unit;
    let mut high = 0u32;
    let mut is_merged = 0i32;
    if own < columns {
        high = sort_key(given.numbers[start + own]);
        if comptime!(output == RankOutput::Priority) {
            is_merged = select(given.parents[start + own] >= 0, i32::new(1), i32::new(0));
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
                others[at] = sort_key(given.numbers[start + first + at]);
                if comptime!(output == RankOutput::Priority) {
                    let parents = given.parents[start + first + at];
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
            let token = given.ranked[start + own] as usize;
            ranks.priorities[start + token] = -f32::cast_from(better);
        } else {
            ranks.indices[start + better as usize] = i32::cast_from(own);
        }
    }
}

/// Rows of tokens in groups.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct TokenGroups {
    /// `[rows, columns]`
    scores: Box<[f32]>,
    /// Tokens by rank, `[rows, columns]`.
    ranked: Box<[i32]>,
    /// Ranks of the tokens that others are merged into, `[rows, columns]`, negative for none.
    leaders: Box<[i32]>,
    /// The leaders of tokens with finite scores, `[rows, columns]`; [`NO_SLOT`] for tokens without
    /// a leader.
    parents: Box<[i32]>,
    /// Sums of groups, `[rows, columns]`, in the order of `ranked`.
    sums: Box<[f32]>,
    rows: usize,
    columns: usize,
}

/// Sums the groups of every row, one cube a row: from the lowest rank up, each token adds its sum
/// to its leader's sum.
#[cube(launch_unchecked)]
pub(crate) fn group_sums_kernel(
    groups: &mut TokenGroups,
    // Whether a cube's barrier leaves global memory unordered, so that a fence is needed.
    #[comptime] fenced: bool,
) {
    let row = CUBE_POS;
    if row >= groups.rows {
        terminate!();
    }
    let columns = groups.columns;
    let start = row * columns;
    let unit = UNIT_POS as usize;
    let mut rank = unit;
    while rank < columns {
        let score = groups.scores[start + groups.ranked[start + rank] as usize];
        groups.sums[start + rank] = score;
        // Infinite scores and NaN join no group.
        let finite = u32::reinterpret(score) & 0x7f80_0000u32 != 0x7f80_0000u32;
        let leader = groups.leaders[start + rank];
        groups.parents[start + rank] = select(finite, leader, i32::new(NO_SLOT as i64));
        rank += UNITS;
    }
    let mut own = Shared::<[f32]>::new_slice(NUMBERS_PER_BLOCK);
    let mut to = Shared::<[i32]>::new_slice(NUMBERS_PER_BLOCK);
    let tiles = columns.div_ceil(NUMBERS_PER_BLOCK);
    for tile in 0..tiles {
        let first = (tiles - 1 - tile) * NUMBERS_PER_BLOCK;
        // All later tiles have added their sums.
        sync_memory(fenced);
        #[unroll]
        for i in 0..EACH {
            let at = i * UNITS + unit;
            if first + at < columns {
                to[at] = groups.parents[start + first + at];
                own[at] = groups.sums[start + first + at];
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
                        groups.sums[start + leader] += more;
                    }
                }
            }
        }
        sync_cube();
        #[unroll]
        for i in 0..EACH {
            let at = i * UNITS + unit;
            if first + at < columns {
                groups.sums[start + first + at] = own[at];
            }
        }
    }
}
