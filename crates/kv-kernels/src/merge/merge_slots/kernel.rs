//! The kernel of `merge_slots`, with one team of units for each kept slot. The team sums the slot's
//! victims online, as attention sums values. A cube searches the list for the victims of all its
//! slots together.

use cubecl::prelude::*;

use super::sums::{add, no_sums, outcome, settle};
use super::{KeyRule, VOTES_RADIX};
use crate::components::pool::Pool;
use crate::components::prefix_sum::exclusive;
use crate::components::sentinels::{LOG_OF_ZERO, NO_SLOT};

/// Units of a cube.
pub(crate) const UNITS: usize = 256;
/// Numbers of a slot's weight where votes are counted. A sum comes behind them.
const COUNTED: usize = 4;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Vectors of a row.
    pub(crate) columns: usize,
    /// Units that share a kept slot: a power of two, at least `columns` and at most `UNITS`.
    pub(crate) team: usize,
    pub(crate) rule: KeyRule,
    /// Whether the paper's factor is used without a guard.
    pub(crate) literal: bool,
    pub(crate) queried: bool,
    /// Whether victims are slots of the target pool.
    pub(crate) within: bool,
    /// Numbers of a slot's weight: 2, 4 with votes, or 5 with votes and a sum.
    pub(crate) numbers: usize,
}

/// The slots that are merged into others.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Victims {
    /// `[R, width]`
    slots: Box<[i32]>,
    /// Victims of each row, `[R]`.
    counts: Box<[i32]>,
    /// Places in the list of kept slots, `[R, width]`, [`NO_SLOT`] for none.
    targets: Box<[i32]>,
    /// Logarithms of weight and score, then votes and a number to sum up where the blueprint has
    /// them, `[R, width, numbers]`.
    weights: Box<[f32]>,
    width: usize,
}

/// The slots that victims are merged into.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeptSlots {
    /// `[R, n_kept]`
    slots: Box<[i32]>,
    /// Kept slots of each row, `[R]`.
    counts: Box<[i32]>,
    /// The numbers of [`Victims::weights`] for kept slots, `[R, n_kept, numbers]`.
    weights: Box<[f32]>,
    /// The weights after the merges, `[R, n_kept, numbers]`.
    merged_weights: Box<[f32]>,
    /// Whether the guard tripped, `[R, n_kept]`.
    guarded: Box<[i32]>,
    /// `R`
    rows: usize,
    n_kept: usize,
}

/// The queries towards which keys move, and the limits of the moves.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyMoves<N: Size> {
    /// `[R, columns]`, in vectors of `N`, where [`Blueprint::queried`].
    queries: Box<[Vector<f32, N>]>,
    /// The largest factor of a key. The smallest factor is its inverse.
    guard: f32,
    /// The factor of `q · k`.
    scale: f32,
}

/// Merges slots of the pool `from`, or of `pool` itself, into kept slots of `pool`. Rows are read
/// in vectors of `N`.
#[cube(launch_unchecked)]
pub(crate) fn merge_slots_kernel<F: Float, N: Size>(
    from: &Pool<Vector<F, N>, Vector<F, N>>,
    pool: &mut Pool<Vector<F, N>, Vector<F, N>>,
    victims: &Victims,
    kept: &mut KeptSlots,
    moves: &KeyMoves<N>,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let columns = blueprint.columns.comptime();
    let numbers = blueprint.numbers.comptime();
    let team = blueprint.team.comptime();
    let teams = comptime!(UNITS / team);
    let (width, n_kept) = (victims.width, kept.n_kept);
    let tiles = n_kept.div_ceil(teams);
    if CUBE_POS >= kept.rows * tiles {
        terminate!();
    }
    let row = CUBE_POS / tiles;
    let unit = UNIT_POS as usize;
    let kept_index = CUBE_POS % tiles * teams + unit / team;
    let column = unit % team;
    let live = kept_index < kept.counts[row] as usize;
    let reads = live && column < columns;

    // The kept slot is the first member of its group.
    let mut slot = 0usize;
    let mut log_weight = f32::new(LOG_OF_ZERO);
    let mut log_score = f32::new(LOG_OF_ZERO);
    let mut key = Vector::<f32, N>::new(0.0f32);
    let mut value = Vector::<f32, N>::new(0.0f32);
    if live {
        slot = kept.slots[row * n_kept + kept_index] as usize;
        log_weight = kept.weights[(row * n_kept + kept_index) * numbers];
        log_score = kept.weights[(row * n_kept + kept_index) * numbers + 1];
    }
    if reads {
        key = Vector::cast_from(pool.keys[slot * columns + column]);
        value = Vector::cast_from(pool.values[slot * columns + column]);
    }
    // Averages by weight alone, for groups without mass.
    let own_key = key;
    let mut spread = 0.0f32;
    let mut plain_key = key;
    let mut plain_value = value;
    let mut sums = no_sums();
    let mut members = 0u32;
    let mut votes = 0u32;
    let mut votes_high = 0u32;
    let mut inherited = 0.0f32;
    let (_, own) = add(&mut sums, log_weight, log_score);
    key *= Vector::new(own);
    value *= Vector::new(own);

    // Looks through the victims in turns for those that go into one of the cube's slots.
    // `found_targets` says into which.
    let mut found = Shared::<[u32]>::new_slice(UNITS);
    let mut found_targets = Shared::<[i32]>::new_slice(UNITS);
    let mut parts = Shared::<[u32]>::new_slice(UNITS);
    let begin = i32::cast_from(CUBE_POS % tiles * teams);
    let count = victims.counts[row] as usize;
    let mut first = 0usize;
    while first < count {
        let mut target = i32::new(NO_SLOT as i64);
        if first + unit < count {
            target = victims.targets[row * width + first + unit];
        }
        let taken = target >= begin && target < begin + comptime!(teams as i32);
        let (to, all) = exclusive(select(taken, 1u32, 0u32), &mut parts);
        if taken {
            found[to as usize] = (row * width + first + unit) as u32;
            found_targets[to as usize] = target;
        }
        sync_cube();
        for i in 0..all as usize {
            if live && found_targets[i] == i32::cast_from(kept_index) {
                let at = found[i] as usize;
                let log_weight = victims.weights[at * numbers];
                let log_score = victims.weights[at * numbers + 1];
                let victim = victims.slots[at] as usize;
                let old_votes = sums.top_votes;
                let (old, own) = add(&mut sums, log_weight, log_score);
                members += 1u32;
                if comptime!(numbers >= COUNTED) {
                    votes += u32::cast_from(victims.weights[at * numbers + 2]);
                    votes_high += u32::cast_from(victims.weights[at * numbers + 3]);
                }
                if comptime!(numbers > COUNTED) {
                    inherited += victims.weights[at * numbers + COUNTED];
                }
                if reads {
                    let at = victim * columns + column;
                    let next_key = row_of::<F, N>(&from.keys, &pool.keys, at, blueprint.within);
                    let next_value =
                        row_of::<F, N>(&from.values, &pool.values, at, blueprint.within);
                    let gap = next_key - own_key;
                    spread += gap.dot(gap);
                    key = key * Vector::new(old) + next_key * Vector::new(own);
                    value = value * Vector::new(old) + next_value * Vector::new(own);
                    let fade = Vector::new((old_votes - sums.top_votes).exp());
                    let share = Vector::new((log_weight - sums.top_votes).exp());
                    plain_key = plain_key * fade + next_key * share;
                    plain_value = plain_value * fade + next_value * share;
                }
            }
        }
        first += UNITS;
    }

    let mut result = outcome(&sums, moves.guard, blueprint.rule, blueprint.literal);
    if result.massless {
        key = plain_key / Vector::new(sums.votes);
        value = plain_value / Vector::new(sums.votes);
    } else {
        key /= Vector::new(sums.mass);
        value /= Vector::new(sums.mass);
    }
    if comptime!(blueprint.rule != KeyRule::Mean) {
        let mut query = Vector::<f32, N>::new(0.0f32);
        if comptime!(blueprint.queried) && reads {
            query = moves.queries[row * columns + column];
        }
        // Squared norms, summed over the team's units.
        let mut sums = Shared::<[f32]>::new_slice(comptime!(3 * UNITS));
        sums[unit] = spread;
        sums[UNITS + unit] = key.dot(key);
        sums[comptime!(2 * UNITS) + unit] = query.dot(query);
        sync_cube();
        #[unroll]
        for level in 1..comptime!(team.ilog2() + 1) {
            let stride = comptime!(team >> level);
            if column < stride {
                #[unroll]
                for part in 0..3 {
                    let at = comptime!(part * UNITS) + unit;
                    sums[at] += sums[at + stride];
                }
            }
            sync_cube();
        }
        let first = unit - column;
        let square = sums[comptime!(2 * UNITS) + first];
        let (guard, scale) = (moves.guard, moves.scale);
        settle(&mut result, sums[first], sums[UNITS + first], square, guard, scale);
        key *= Vector::new(result.factor);
        // Equal keys stay unchanged, so that repeated merges add no rounding.
        if sums[first] == 0.0f32 {
            key = own_key;
        }
        if result.step != 0.0f32 {
            key += query * Vector::new(result.step / (scale * square));
        }
    }
    let changed = live && members > 0;
    if reads && changed {
        pool.keys[slot * columns + column] = Vector::cast_from(key);
        pool.values[slot * columns + column] = Vector::cast_from(value);
    }
    if column == 0 && kept_index < n_kept {
        let at = row * n_kept + kept_index;
        kept.guarded[at] = select(changed && result.guarded, 1i32, 0i32);
        let weight = result.votes + result.excess;
        kept.merged_weights[at * numbers] = select(changed, weight, kept.weights[at * numbers]);
        let score = result.target - result.excess;
        kept.merged_weights[at * numbers + 1] =
            select(changed, score, kept.weights[at * numbers + 1]);
        if comptime!(numbers > COUNTED) {
            kept.merged_weights[at * numbers + COUNTED] =
                kept.weights[at * numbers + COUNTED] + inherited;
        }
        if comptime!(numbers >= COUNTED) {
            let radix = comptime!(VOTES_RADIX as u32).runtime();
            votes += u32::cast_from(kept.weights[at * numbers + 2]);
            votes_high += u32::cast_from(kept.weights[at * numbers + 3]) + votes / radix;
            kept.merged_weights[at * numbers + 2] = f32::cast_from(votes % radix);
            kept.merged_weights[at * numbers + 3] = f32::cast_from(votes_high);
        }
    }
}

/// A vector of a victim's row.
#[cube]
fn row_of<F: Float, N: Size>(
    from: &[Vector<F, N>],
    pool: &[Vector<F, N>],
    at: usize,
    #[comptime] within: bool,
) -> Vector<f32, N> {
    let mut row = Vector::<f32, N>::new(0.0f32);
    if within {
        row += Vector::cast_from(pool[at]);
    } else {
        row += Vector::cast_from(from[at]);
    }
    row
}
