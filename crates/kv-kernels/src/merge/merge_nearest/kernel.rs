//! The kernel of `merge_nearest`, with one cube a range. All its teams compare keys with the
//! victim's key. Then the first plane merges, while the other planes add scores to averages.

use cubecl::prelude::*;

use super::alike::{Search, inverse_norm, keys_of_round, last_round, most_alike};
use super::blueprint::Blueprint;
use crate::components::pool::Pool;
use crate::components::sentinels::NO_INDEX;
use crate::merge::merge_slots::sums::{add, no_sums, outcome, settle};
use crate::merge::merge_slots::{KeyRule, VOTES_RADIX};
use crate::slots::average_scores::kernel::{Blueprint as Average, ScoreWeights, averaged, log_add};

/// The numbers of a pool's slots besides keys and values.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SlotNumbers {
    /// Logarithms of weights, `[S]`.
    log_weights: Box<[f32]>,
    /// Logarithms of sums of scores, `[S]`.
    log_scores: Box<[f32]>,
    /// Logarithms of the sums of these scores' factors, `[S]`.
    log_samples: Box<[f32]>,
    /// Votes modulo [`VOTES_RADIX`], `[S]`.
    votes: Box<[f32]>,
    /// Votes in multiples of [`VOTES_RADIX`], `[S]`.
    votes_high: Box<[f32]>,
    /// Numbers that merges add up, `[S]`, where [`Blueprint::inherits`].
    inherited: Box<[f32]>,
    /// Which merges each slot takes, `[S]`, where [`Blueprint::choosy`].
    takes: Box<[f32]>,
}

/// The head ranges of a call, and their victims.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MergingRanges {
    /// First slots, `[B, Hkv]`.
    offsets: Box<[i32]>,
    /// Live slots, `[B, Hkv]`.
    lengths: Box<[i32]>,
    /// The slots that are merged into others, `[B, Hkv]`, negative for none.
    victims: Box<[i32]>,
    /// 0 where the victim is not merged, `[B, Hkv]`.
    goes: Box<[i32]>,
    /// `B * Hkv`
    total_kv_heads: usize,
}

/// A step's queries and logits.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MergingStep<F: Float, N: Size> {
    /// `[B * Hkv, group, columns]`, in vectors of `N`.
    queries: Box<[Vector<F, N>]>,
    /// `[S, averaged]`
    logits: Box<[f32]>,
}

/// When slots are merged, and how.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MergeRules {
    /// The factors with which a step's scores enter the averages.
    weights: ScoreWeights,
    /// The cosine above which a victim is merged.
    threshold: f32,
    /// The logarithm of the number that is added to averages.
    log_epsilon: f32,
    /// The largest factor of a key. The smallest factor is its inverse.
    guard: f32,
    /// The factor of `q · k`.
    scale: f32,
}

/// Merges by one cube a range. Rows are read in vectors of `N`.
#[cube(launch_unchecked)]
pub(crate) fn merge_nearest_kernel<F: Float, N: Size>(
    pool: &mut Pool<Vector<F, N>, Vector<F, N>>,
    slots: &mut SlotNumbers,
    ranges: &MergingRanges,
    attended: &MergingStep<F, N>,
    rules: &MergeRules,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let (columns, team_size) = comptime!((blueprint.columns, blueprint.team));
    let own = blueprint.own().comptime();
    let kv_head = CUBE_POS;
    if kv_head >= ranges.total_kv_heads {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let member = unit % team_size;
    let start = ranges.offsets[kv_head] as usize;
    let length = ranges.lengths[kv_head] as usize;
    let chosen = ranges.victims[kv_head];
    let stays = ranges.goes[kv_head] == 0 || chosen < 0;
    let victim = select(stays, start as i32, chosen) as usize;
    if length == 0 {
        terminate!();
    }

    let last = last_round(length, blueprint);
    let mut held = keys_of_round::<F, N>(&pool.keys, start, length, last, blueprint);
    let columns_of_victim = own_columns::<F, N>(&pool.keys, victim, blueprint);
    let victim_key = wide::<F, N>(&columns_of_victim, blueprint);
    let mut target = victim;
    if !stays {
        let search = Search {
            scale: inverse_norm(&victim_key, blueprint),
            start,
            length,
            victim: victim - start,
            threshold: rules.threshold,
        };
        let slot_in_head = most_alike::<F, N>(
            &pool.keys,
            &slots.takes,
            &mut held,
            &victim_key,
            &search,
            blueprint,
        );
        if slot_in_head != NO_INDEX {
            target = start + slot_in_head as usize;
        }
    }
    // All units know the target. The first plane merges, and the other planes average all slots
    // except the merged ones. A cube of one plane does both, one after the other.
    let merges = target != victim;
    let alone = CUBE_DIM <= PLANE_DIM;
    let merging = select(merges && !alone, PLANE_DIM, 0u32);
    if comptime!(blueprint.averaged > 0) && UNIT_POS >= merging {
        let (units, unit) = ((CUBE_DIM - merging) as usize, (UNIT_POS - merging) as usize);
        let each = blueprint.averages.comptime();
        let mut first = unit;
        while first < length {
            // All numbers are read before any is written, so that no read waits for another.
            let mut sums = Array::<f32>::new(each);
            let mut samples = Array::<f32>::new(each);
            #[unroll]
            for e in 0..each {
                let slot = start + min(first + e * units, length - 1);
                let (sum, count) =
                    average_of(&*slots, &attended.logits, slot, &rules.weights, blueprint);
                sums[e] = sum;
                samples[e] = count;
            }
            #[unroll]
            for e in 0..each {
                let slot_in_head = first + e * units;
                let slot = start + slot_in_head;
                if slot_in_head < length && !(merges && (slot == target || slot == victim)) {
                    slots.log_scores[slot] = sums[e];
                    slots.log_samples[slot] = samples[e];
                }
            }
            first += each * units;
        }
    }
    if !merges || UNIT_POS >= PLANE_DIM {
        terminate!();
    }

    // All reads of the two slots are issued before any is waited for.
    let key = wide::<F, N>(&own_columns(&pool.keys, target, blueprint), blueprint);
    let value = wide::<F, N>(&own_columns(&pool.values, target, blueprint), blueprint);
    let victim_value = wide::<F, N>(&own_columns(&pool.values, victim, blueprint), blueprint);
    let mut query = Array::<Vector<f32, N>>::new(own);
    let moves = comptime!(matches!(blueprint.rule, KeyRule::Paper | KeyRule::Additive));
    #[unroll]
    for c in 0..own {
        query[c] = Vector::new(0.0f32);
        if comptime!(moves && blueprint.group > 0) && member + c * team_size < columns {
            let column = member + c * team_size;
            query[c] =
                mean_query::<F, N>(&attended.queries, kv_head, column, columns, blueprint.group);
        }
    }
    let (weight, victim_weight) = (slots.log_weights[target], slots.log_weights[victim]);
    let (sum, samples) = average_of(&*slots, &attended.logits, target, &rules.weights, blueprint);
    let (victim_sum, victim_samples) =
        average_of(&*slots, &attended.logits, victim, &rules.weights, blueprint);
    let score = log_add(sum - samples, rules.log_epsilon);
    let victim_score = log_add(victim_sum - victim_samples, rules.log_epsilon);
    let low = slots.votes[target] + slots.votes[victim];
    let high = slots.votes_high[target] + slots.votes_high[victim];
    let mut sums = no_sums();
    let (_, first) = add(&mut sums, weight, score);
    let (fade, second) = add(&mut sums, victim_weight, victim_score);
    let mut result = outcome(&sums, rules.guard, blueprint.rule, blueprint.literal);
    let mut share = first * fade / sums.mass;
    let mut victim_share = second / sums.mass;
    if result.massless {
        share = (weight - result.votes).exp();
        victim_share = (victim_weight - result.votes).exp();
    }
    let mut step = 0.0f32;
    let mut alike = false;
    if comptime!(blueprint.rule != KeyRule::Mean) {
        let mut spread = 0.0f32;
        let mut key_square = 0.0f32;
        let mut query_square = 0.0f32;
        #[unroll]
        for c in 0..own {
            let gap = victim_key[c] - key[c];
            spread += gap.dot(gap);
            let mean = key[c] * Vector::new(share) + victim_key[c] * Vector::new(victim_share);
            key_square += mean.dot(mean);
            query_square += query[c].dot(query[c]);
        }
        #[unroll]
        for level in 0..comptime!(team_size.ilog2()) {
            spread += plane_shuffle_xor(spread, comptime!(1u32 << level));
            key_square += plane_shuffle_xor(key_square, comptime!(1u32 << level));
            query_square += plane_shuffle_xor(query_square, comptime!(1u32 << level));
        }
        alike = spread == 0.0f32;
        let (guard, scale) = (rules.guard, rules.scale);
        settle(&mut result, spread, key_square, query_square, guard, scale);
        if result.step != 0.0f32 {
            step = result.step / (scale * query_square);
        }
    } else {
        share = plane_max(share);
        victim_share = plane_max(victim_share);
    }
    // All reads of the plane's units have ended: their numbers are in the sums or shares above.
    #[unroll]
    for c in 0..own {
        let column = member + c * team_size;
        if unit < team_size && column < columns {
            let to = target * columns + column;
            // Equal keys stay unchanged, so that repeated merges add no rounding.
            if !alike {
                let mean = key[c] * Vector::new(share * result.factor)
                    + victim_key[c] * Vector::new(victim_share * result.factor);
                pool.keys[to] = Vector::cast_from(mean + query[c] * Vector::new(step));
            }
            let mean = value[c] * Vector::new(share) + victim_value[c] * Vector::new(victim_share);
            pool.values[to] = Vector::cast_from(mean);
        }
    }
    if unit == 0 {
        let carry = (low / f32::new(VOTES_RADIX)).floor();
        slots.votes[target] = low - carry * f32::new(VOTES_RADIX);
        slots.votes_high[target] = high + carry;
        slots.log_weights[target] = result.votes + result.excess;
        slots.log_scores[target] = result.target - result.excess + samples;
        slots.log_samples[target] = samples;
        slots.log_scores[victim] = victim_sum;
        slots.log_samples[victim] = victim_samples;
        if comptime!(blueprint.inherits) {
            let sum = slots.inherited[target] + slots.inherited[victim];
            slots.inherited[target] = sum;
        }
    }
}

/// A slot's sum of scores and sum of factors. The step's scores are added where there are any.
#[cube]
fn average_of(
    slots: &SlotNumbers,
    logits: &[f32],
    slot: usize,
    weights: &ScoreWeights,
    #[comptime] blueprint: Blueprint,
) -> (f32, f32) {
    if comptime!(blueprint.averaged > 0) {
        let average = comptime!(Average { group: blueprint.averaged, weighted: true });
        averaged(
            &slots.log_scores,
            &slots.log_samples,
            logits,
            &slots.log_weights,
            slot,
            weights,
            average,
        )
    } else {
        (slots.log_scores[slot], slots.log_samples[slot])
    }
}

/// The vectors of a row that a unit holds.
#[cube]
fn own_columns<F: Float, N: Size>(
    rows: &[Vector<F, N>],
    row: usize,
    #[comptime] blueprint: Blueprint,
) -> Array<Vector<F, N>> {
    let (columns, team_size) = comptime!((blueprint.columns, blueprint.team));
    let own = blueprint.own().comptime();
    let mut held = Array::<Vector<F, N>>::new(own);
    #[unroll]
    for c in 0..own {
        let column = UNIT_POS as usize % team_size + c * team_size;
        held[c] = rows[row * columns + min(column, comptime!(columns - 1))];
    }
    held
}

/// A unit's vectors of a row as f32, with zeros after the row's end.
#[cube]
fn wide<F: Float, N: Size>(
    held: &Array<Vector<F, N>>,
    #[comptime] blueprint: Blueprint,
) -> Array<Vector<f32, N>> {
    let (columns, team_size) = comptime!((blueprint.columns, blueprint.team));
    let own = blueprint.own().comptime();
    let mut wide = Array::<Vector<f32, N>>::new(own);
    #[unroll]
    for c in 0..own {
        wide[c] = Vector::cast_from(held[c]);
        if comptime!(!columns.is_multiple_of(team_size))
            && UNIT_POS as usize % team_size + c * team_size >= columns
        {
            wide[c] = Vector::new(0.0f32);
        }
    }
    wide
}

/// A column of the mean of a range's queries.
#[cube]
fn mean_query<F: Float, N: Size>(
    queries: &[Vector<F, N>],
    kv_head: usize,
    column: usize,
    #[comptime] columns: usize,
    #[comptime] group: usize,
) -> Vector<f32, N> {
    let mut sum = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for g in 0..group {
        sum += Vector::cast_from(queries[(kv_head * group + g) * columns + column]);
    }
    sum / Vector::new(f32::cast_from(group.runtime()))
}
