//! The CubeCL kernel: a cube a range, whose units take scores into averages, whose teams compare keys, and whose first
//! units merge.

use cubecl::prelude::*;

use super::VOTES_RADIX;
use super::alike::most_alike;
use crate::average_scores::kernel::{average, log_add};
use crate::evicting_attention::weigh::NOWHERE;
use crate::merge_slots::KeyRule;
use crate::merge_slots::sums::{add, no_sums, outcome, settle};

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Vectors of a row.
    pub(crate) columns: usize,
    /// Units that share a slot's key: a power of two, at most a plane.
    pub(crate) team: usize,
    /// Units of a cube, at least `columns`.
    pub(crate) units: usize,
    /// Slots that a team reads before it waits for the first.
    pub(crate) ahead: usize,
    /// Planes of a cube, at most.
    pub(crate) planes: usize,
    pub(crate) rule: KeyRule,
    pub(crate) literal: bool,
    /// Query heads of a range, whose queries are given; 0 where there are none.
    pub(crate) group: usize,
    /// Logits of a slot that go into its average; 0 where there are none.
    pub(crate) averaged: usize,
    /// Whether barriers for shared memory leave memory unordered.
    pub(crate) fenced: bool,
}

/// # Shapes
/// In vectors of `N`: `keys` and `values` `[S, columns]`, `queries` `[B * Hkv, group, columns]`; the others as
/// [`super::merge_nearest`] has them.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn merge_nearest_kernel<F: Float, N: Size>(
    keys: &mut [Vector<F, N>],
    values: &mut [Vector<F, N>],
    log_weights: &mut [f32],
    log_scores: &mut [f32],
    log_samples: &mut [f32],
    votes: &mut [f32],
    votes_high: &mut [f32],
    offsets: &[i32],
    lengths: &[i32],
    victims: &[i32],
    goes: &[i32],
    queries: &[Vector<F, N>],
    logits: &[f32],
    pairs: usize,
    new: f32,
    old: f32,
    threshold: f32,
    log_epsilon: f32,
    guard: f32,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let columns = blueprint.columns.comptime();
    let team_size = blueprint.team.comptime();
    let own = columns.div_ceil(team_size).comptime();
    let pair = CUBE_POS;
    if pair >= pairs {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let member = unit % team_size;
    let start = offsets[pair] as usize;
    let length = lengths[pair] as usize;
    let stays = goes[pair] == 0 || victims[pair] < 0;
    let victim = select(stays, 0i32, victims[pair]) as usize;

    let mut victim_key = Array::<Vector<F, N>>::new(own);
    #[unroll]
    for c in 0..own {
        let column = min(member + c * team_size, comptime!(columns - 1));
        victim_key[c] = keys[victim * columns + column];
    }
    if comptime!(blueprint.averaged > 0) {
        let mut slot = start + unit;
        while slot < start + length {
            let (group, weighted) = comptime!((blueprint.averaged, true));
            average(
                log_scores,
                log_samples,
                logits,
                &*log_weights,
                slot,
                new,
                old,
                group,
                weighted,
            );
            slot += blueprint.units;
        }
        // Merges read these behind the search's barrier, where that orders memory, too.
        if comptime!(blueprint.fenced) {
            sync_storage();
        }
    }
    if stays {
        terminate!();
    }
    let mut q = Array::<Vector<f32, N>>::new(own);
    #[unroll]
    for c in 0..own {
        q[c] = Vector::new(0.0f32);
        if member + c * team_size < columns {
            q[c] = Vector::cast_from(victim_key[c]);
        }
    }
    let (least, place) = most_alike::<F, N>(&*keys, &q, start, length, victim, blueprint);
    if place == NOWHERE || -least <= threshold {
        terminate!();
    }
    let target = start + place as usize;

    // All that is changed is on its way before any of it is waited for.
    let written = min(unit, comptime!(columns - 1));
    let (to, from) = (target * columns + written, victim * columns + written);
    let key = Vector::<f32, N>::cast_from(keys[to]);
    let other_key = Vector::<f32, N>::cast_from(keys[from]);
    let value = Vector::<f32, N>::cast_from(values[to]);
    let other_value = Vector::<f32, N>::cast_from(values[from]);
    let mut query = Vector::<f32, N>::new(0.0f32);
    let moves = comptime!(matches!(blueprint.rule, KeyRule::Paper | KeyRule::Additive));
    if comptime!(moves && blueprint.group > 0) {
        query += mean_query::<F, N>(queries, pair, written, columns, blueprint.group);
    }
    let (weight, other_weight) = (log_weights[target], log_weights[victim]);
    let score = log_add(log_scores[target] - log_samples[target], log_epsilon);
    let other_score = log_add(log_scores[victim] - log_samples[victim], log_epsilon);
    let (low, high) = (votes[target] + votes[victim], votes_high[target] + votes_high[victim]);
    let mut sums = no_sums();
    let (_, first) = add(&mut sums, weight, score);
    let (fade, second) = add(&mut sums, other_weight, other_score);
    let mut result = outcome(&sums, guard, blueprint.rule, blueprint.literal);
    let mut share = first * fade / sums.mass;
    let mut other_share = second / sums.mass;
    if result.massless {
        share = (weight - result.votes).exp();
        other_share = (other_weight - result.votes).exp();
    }
    let mut step = 0.0f32;
    let mut alike = false;
    if comptime!(blueprint.rule != KeyRule::Mean) {
        let mut spread = 0.0f32;
        let mut key_square = 0.0f32;
        let mut query_square = 0.0f32;
        #[unroll]
        for c in 0..own {
            let column = member + c * team_size;
            if column < columns {
                let key = Vector::<f32, N>::cast_from(keys[target * columns + column]);
                let gap = q[c] - key;
                spread += gap.dot(gap);
                let mean = key * Vector::new(share) + q[c] * Vector::new(other_share);
                key_square += mean.dot(mean);
                if comptime!(moves && blueprint.group > 0) {
                    let query = mean_query::<F, N>(queries, pair, column, columns, blueprint.group);
                    query_square += query.dot(query);
                }
            }
        }
        #[unroll]
        for level in 0..comptime!(team_size.ilog2()) {
            spread += plane_shuffle_xor(spread, comptime!(1u32 << level));
            key_square += plane_shuffle_xor(key_square, comptime!(1u32 << level));
            query_square += plane_shuffle_xor(query_square, comptime!(1u32 << level));
        }
        alike = spread == 0.0f32;
        settle(&mut result, spread, key_square, query_square, guard, scale);
        if result.step != 0.0f32 {
            step = result.step / (scale * query_square);
        }
    }
    // All have read what is written now.
    sync_cube();
    if unit < columns {
        // Keys that are the same stay, free of rounding, however often.
        if !alike {
            let mean = key * Vector::new(share * result.factor)
                + other_key * Vector::new(other_share * result.factor);
            keys[to] = Vector::cast_from(mean + query * Vector::new(step));
        }
        values[to] =
            Vector::cast_from(value * Vector::new(share) + other_value * Vector::new(other_share));
    }
    if unit == 0 {
        let carry = (low / f32::new(VOTES_RADIX)).floor();
        votes[target] = low - carry * f32::new(VOTES_RADIX);
        votes_high[target] = high + carry;
        log_weights[target] = result.votes + result.excess;
        log_scores[target] = result.target - result.excess + log_samples[target];
    }
}

/// A column of the mean of a range's queries.
#[cube]
fn mean_query<F: Float, N: Size>(
    queries: &[Vector<F, N>],
    pair: usize,
    column: usize,
    #[comptime] columns: usize,
    #[comptime] group: usize,
) -> Vector<f32, N> {
    let mut sum = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for g in 0..group {
        sum += Vector::cast_from(queries[(pair * group + g) * columns + column]);
    }
    sum / Vector::new(f32::cast_from(group.runtime()))
}
