//! The CubeCL kernel: a team of units a kept slot, which sums its victims online, as attention
//! does. A cube looks for its slots' victims together.

use cubecl::prelude::*;

use super::sums::{add, no_sums, outcome, settle};
use super::{KeyRule, VOTES_RADIX};
use crate::components::prefix_sum::exclusive;
use crate::components::sentinels::LOG_OF_ZERO;

/// Units of a cube.
pub(crate) const UNITS: usize = 256;
/// Numbers of a weight with votes.
const COUNTED: usize = 4;

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Vectors of a row.
    pub(crate) columns: usize,
    /// Units that share a kept slot, a power of two from `columns` on, up to `UNITS`.
    pub(crate) team: usize,
    pub(crate) rule: KeyRule,
    /// Whether the paper's factor is not to be guarded.
    pub(crate) literal: bool,
    pub(crate) queried: bool,
    /// Whether victims are slots of the pool that is written to.
    pub(crate) within: bool,
    /// Numbers of a weight: with votes, or without.
    pub(crate) numbers: usize,
}

/// # Shapes
/// In vectors of `N`: `from_keys` and `from_values` `[Sv, columns]`, `keys` and `values`
/// `[S, columns]`, `queries` `[P, columns]`; the others as [`super::MergeLists`] and
/// [`super::Merged`] have them.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn merge_slots_kernel<F: Float, N: Size>(
    from_keys: &[Vector<F, N>],
    from_values: &[Vector<F, N>],
    victims: &[i32],
    victim_counts: &[i32],
    targets: &[i32],
    victim_weights: &[f32],
    kept: &[i32],
    kept_counts: &[i32],
    kept_weights: &[f32],
    queries: &[Vector<f32, N>],
    keys: &mut [Vector<F, N>],
    values: &mut [Vector<F, N>],
    weights: &mut [f32],
    guarded: &mut [i32],
    rows: usize,
    width: usize,
    n_kept: usize,
    guard: f32,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let columns = blueprint.columns.comptime();
    let numbers = blueprint.numbers.comptime();
    let team = blueprint.team.comptime();
    let teams = comptime!(UNITS / team);
    let tiles = n_kept.div_ceil(teams);
    if CUBE_POS >= rows * tiles {
        terminate!();
    }
    let row = CUBE_POS / tiles;
    let unit = UNIT_POS as usize;
    let kept_index = CUBE_POS % tiles * teams + unit / team;
    let column = unit % team;
    let live = kept_index < kept_counts[row] as usize;
    let reads = live && column < columns;

    // The kept slot is the first member of its group.
    let mut slot = 0usize;
    let mut log_weight = f32::new(LOG_OF_ZERO);
    let mut log_score = f32::new(LOG_OF_ZERO);
    let mut key = Vector::<f32, N>::new(0.0f32);
    let mut value = Vector::<f32, N>::new(0.0f32);
    if live {
        slot = kept[row * n_kept + kept_index] as usize;
        log_weight = kept_weights[(row * n_kept + kept_index) * numbers];
        log_score = kept_weights[(row * n_kept + kept_index) * numbers + 1];
    }
    if reads {
        key = Vector::cast_from(keys[slot * columns + column]);
        value = Vector::cast_from(values[slot * columns + column]);
    }
    // Sums by votes alone serve groups without mass.
    let own_key = key;
    let mut spread = 0.0f32;
    let mut plain_key = key;
    let mut plain_value = value;
    let mut sums = no_sums();
    let mut members = 0u32;
    let mut votes = 0u32;
    let mut votes_high = 0u32;
    let (_, own) = add(&mut sums, log_weight, log_score);
    key *= Vector::new(own);
    value *= Vector::new(own);

    // Of victims in turn, those that go into any of the cube's slots, and where.
    let mut found = Shared::<[u32]>::new_slice(UNITS);
    let mut found_targets = Shared::<[i32]>::new_slice(UNITS);
    let mut parts = Shared::<[u32]>::new_slice(UNITS);
    let begin = i32::cast_from(CUBE_POS % tiles * teams);
    let count = victim_counts[row] as usize;
    let mut first = 0usize;
    while first < count {
        let mut target = i32::new(-1);
        if first + unit < count {
            target = targets[row * width + first + unit];
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
                let log_weight = victim_weights[at * numbers];
                let log_score = victim_weights[at * numbers + 1];
                let from = victims[at] as usize;
                let old_votes = sums.top_votes;
                let (old, own) = add(&mut sums, log_weight, log_score);
                members += 1u32;
                if comptime!(numbers == COUNTED) {
                    votes += u32::cast_from(victim_weights[at * COUNTED + 2]);
                    votes_high += u32::cast_from(victim_weights[at * COUNTED + 3]);
                }
                if reads {
                    let at = from * columns + column;
                    let next_key = row_of::<F, N>(from_keys, &*keys, at, blueprint.within);
                    let next_value = row_of::<F, N>(from_values, &*values, at, blueprint.within);
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

    let mut result = outcome(&sums, guard, blueprint.rule, blueprint.literal);
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
            query = queries[row * columns + column];
        }
        // Squares of norms, from all units of the team.
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
        settle(&mut result, sums[first], sums[UNITS + first], square, guard, scale);
        key *= Vector::new(result.factor);
        // Free of rounding, however often.
        if sums[first] == 0.0f32 {
            key = own_key;
        }
        if result.step != 0.0f32 {
            key += query * Vector::new(result.step / (scale * square));
        }
    }
    let changed = live && members > 0;
    if reads && changed {
        keys[slot * columns + column] = Vector::cast_from(key);
        values[slot * columns + column] = Vector::cast_from(value);
    }
    if column == 0 && kept_index < n_kept {
        let at = row * n_kept + kept_index;
        guarded[at] = select(changed && result.guarded, 1i32, 0i32);
        let weight = result.votes + result.excess;
        weights[at * numbers] = select(changed, weight, kept_weights[at * numbers]);
        let score = result.target - result.excess;
        weights[at * numbers + 1] = select(changed, score, kept_weights[at * numbers + 1]);
        if comptime!(numbers == COUNTED) {
            let radix = comptime!(VOTES_RADIX as u32).runtime();
            votes += u32::cast_from(kept_weights[at * COUNTED + 2]);
            votes_high += u32::cast_from(kept_weights[at * COUNTED + 3]) + votes / radix;
            weights[at * COUNTED + 2] = f32::cast_from(votes % radix);
            weights[at * COUNTED + 3] = f32::cast_from(votes_high);
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
