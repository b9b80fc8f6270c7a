//! Evicts one common slot from all heads of a sequence, in the kernel for matrix instructions: the
//! slot whose importance, summed over heads, is least. Each head's cube writes the importances of
//! its slots. The cube that arrives last sums them. Without this, a launch after the attention
//! would have to (`evicting/kernel.rs`).
//!
//! Where a cluster shares a head, arrivals are counted for each part, and the last cube of a part
//! searches that part's slots alone. The part that finishes last chooses among the parts. All
//! counters are 0 again afterwards.

use cubecl::prelude::*;

use super::argmin_importance::{
    CandidateSlots, Compared, LOG2_E, TOGETHER, ahead, block_argmin, importance, natural,
    next_write_slot,
};
use super::eviction::Eviction;
use super::range_part::{RangePart, Sequence};
use super::split_kv_reduce::{CubeSums, PLANE, PartialShape};
use crate::components::cluster::LARGEST_CLUSTER;
use crate::components::ptx::{
    arrive_at, discard, exp2, least_of_plane, log2, raise, read_four, take_raised,
};
use crate::components::sentinels::{INFINITE_IMPORTANCE, LOWEST_LOGIT, NO_INDEX};
use crate::components::softmax::is_number;
use crate::components::sort_key::{number_of_key, sort_key};

/// Words of a sequence's counters: the arrivals at each part (a word a part), the least importance
/// and slot of the finished parts (two words), and the number of finished parts.
pub(crate) const ARRIVALS: usize = 16;
const LEAST: usize = LARGEST_CLUSTER;
const THROUGH: usize = LARGEST_CLUSTER + 2;

/// Importances that a unit reads before it waits for the first: as many as registers hold, since
/// the last cube waits for little else. Of each head, it reads at most `MOST_FOURS` vectors.
const MOST_READ: usize = 128;
const MOST_FOURS: usize = 4;
/// Importances of one read, a vector.
const FOUR: usize = 4;
/// Importances of a line of the L2 cache. Each head's importances begin with a line of their own.
pub(super) const LINE: usize = 32;
/// A bound, with a margin, of the error of the device's sums of exponentials, in logarithms to base
/// 2.
const SLACK: f32 = 1e-3;

/// Comptime rules for the eviction of one common slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct TogetherRules {
    /// Heads of a sequence, or 0 where each head evicts its own slot.
    pub(super) heads: usize,
    /// Whether the newest token is no candidate.
    pub(super) spares_newest: bool,
    /// Whether slots are compared by records of importances rather than by this step's.
    pub(super) remembers: bool,
}

/// Writes the importances of a cube's slots, and counts the cube as arrived. Returns how many
/// heads' cubes arrived before it; only the first unit gets the number.
#[cube]
pub(super) fn publish(
    cube: &CubeSums,
    norms: &Array<f32>,
    eviction: &mut Eviction,
    candidates_of_cube: &CandidateSlots,
    part: &RangePart,
    #[comptime] joined: bool,
    #[comptime] sums: PartialShape,
) -> u32 {
    let units = comptime!(sums.planes * PLANE);
    let unit = UNIT_POS as usize;
    let mut before = 0u32;
    let sequence = &part.sequence;
    let group = sums.group.comptime();
    let mut normalisers = Array::<f32>::new(group);
    #[unroll]
    for g in 0..group {
        normalisers[g] = cube.maxima[g] * LOG2_E + log2(cube.weights[g]);
    }
    let ahead = comptime!(ahead(joined, sums));
    let to = part.kv_head * sequence.stride + candidates_of_cube.first;
    #[unroll]
    for round in 0..comptime!(ahead.div_ceil(TOGETHER)) {
        if comptime!(round * TOGETHER * units) < candidates_of_cube.count {
            // A round's importances are all computed before the first is written, so that none
            // waits for another.
            let mut values = Array::<f32>::new(TOGETHER);
            #[unroll]
            for i in 0..comptime!(TOGETHER.min(ahead - round * TOGETHER)) {
                let c = comptime!(round * TOGETHER + i);
                let slot = c * units + unit;
                let value = importance(
                    &cube.totals,
                    &normalisers,
                    norms[c],
                    slot,
                    candidates_of_cube,
                    Compared::OverHeads,
                    group,
                );
                values[i] = number_or_most(value);
            }
            #[unroll]
            for i in 0..comptime!(TOGETHER.min(ahead - round * TOGETHER)) {
                let slot = comptime!((round * TOGETHER + i) * units) + unit;
                if slot < candidates_of_cube.count {
                    eviction.importances[to + slot] = values[i];
                }
            }
        }
    }
    let mut slot = comptime!(ahead * units) + unit;
    while slot < candidates_of_cube.count {
        let first = candidates_of_cube.start + candidates_of_cube.first;
        let norm = eviction.log_norms[first + slot];
        let value = importance(
            &cube.totals,
            &normalisers,
            norm,
            slot,
            candidates_of_cube,
            Compared::OverHeads,
            group,
        );
        eviction.importances[to + slot] = number_or_most(value);
        slot += units;
    }
    sync_cube();
    if unit == 0 {
        before = arrive_at(&eviction.arrivals, sequence.index * ARRIVALS + part.split);
    }
    before
}

/// Replaces NaN by the largest importance, so that the slot is not evicted.
#[cube]
fn number_or_most(value: f32) -> f32 {
    select(is_number(value), value, f32::new(INFINITE_IMPORTANCE))
}

/// Finds the slot to evict, in the cube that arrived last, and writes it for all heads. `arrived`
/// is the number of heads' cubes that arrived before this one; only the first unit knows it.
#[cube]
pub(super) fn give_up_together(
    arrived: u32,
    eviction: &mut Eviction,
    candidates_of_cube: &CandidateSlots,
    part: &RangePart,
    #[comptime] rules: TogetherRules,
    #[comptime] joined: bool,
    #[comptime] sums: PartialShape,
) {
    let TogetherRules { heads, remembers, .. } = rules;
    let unit = UNIT_POS as usize;
    let sequence = &part.sequence;
    if !sequence.full && unit == 0 && part.split == 0 {
        let nowhere = i32::new(NO_INDEX as i64);
        eviction.write_slots[part.kv_head] =
            next_write_slot(nowhere, candidates_of_cube.newest, false, part.length);
    }
    if sequence.full || remembers {
        let mut before = Shared::<[u32]>::new_slice(1usize);
        if unit == 0 {
            before[0] = arrived;
        }
        sync_cube();
        if before[0] == comptime!(heads as u32 - 1) {
            let counters = sequence.index * ARRIVALS;
            let (key, slot_in_head) =
                least_of_part(eviction, candidates_of_cube, sequence, rules, sums);
            // Without the discard the device writes all importances to memory, which takes 1.4 % of
            // the time at 128x32x8x3200 and 2.4 % at 16x32x8x3200. Parts of a range share lines, so
            // a cube with a part must not discard any.
            if comptime!(!joined) {
                let lines = heads * sequence.stride / LINE;
                let mut line = unit;
                while line < lines {
                    discard(&eviction.importances, sequence.first * sequence.stride + line * LINE);
                    line += comptime!(sums.planes * PLANE);
                }
            }
            if unit == 0 {
                eviction.arrivals[counters + part.split] = 0u32;
                let mut done = true;
                let mut chosen = slot_in_head;
                if joined {
                    // Key and slot are inverted: 0 then means no candidate, and the lowest of equal
                    // slots becomes the largest.
                    raise(&eviction.arrivals, counters + LEAST, !key, !(slot_in_head as u32));
                    let through = arrive_at(&eviction.arrivals, counters + THROUGH) as usize;
                    done = through + 1 == part.splits;
                    if done {
                        let (key, slot_in_head) = take_raised(&eviction.arrivals, counters + LEAST);
                        eviction.arrivals[counters + THROUGH] = 0u32;
                        // Without candidates there is no slot to choose.
                        chosen =
                            select(key == 0, i32::new(NO_INDEX as i64), (!slot_in_head) as i32);
                    }
                }
                if done && sequence.full {
                    let next =
                        next_write_slot(chosen, candidates_of_cube.newest, true, part.length);
                    #[unroll]
                    for head in 0..heads {
                        eviction.write_slots[sequence.first + head] = next;
                    }
                }
            }
        }
    }
}

/// Returns the least sum over heads among a part's slots, and its slot, as [`block_argmin`] does.
/// Where steps remember, it is the least record, and records are raised to the sums.
#[cube]
fn least_of_part(
    eviction: &mut Eviction,
    candidates_of_cube: &CandidateSlots,
    sequence: &Sequence,
    #[comptime] rules: TogetherRules,
    #[comptime] sums: PartialShape,
) -> (u32, i32) {
    let TogetherRules { heads, spares_newest, remembers } = rules;
    let units = comptime!(sums.planes * PLANE);
    let each = comptime!((MOST_READ / FOUR / heads).clamp(1, MOST_FOURS));
    let from = sequence.first * sequence.stride + candidates_of_cube.first;
    let common = sequence.length - min(sequence.length, candidates_of_cube.first);
    let count = min(candidates_of_cube.count, common);
    let fours = count.div_ceil(FOUR);
    let nothing = f32::new(INFINITE_IMPORTANCE);
    let mut best = nothing;
    let mut best_slot = 0usize;
    // A sum of importances is at least its largest term, and at most that term times the number of
    // heads. Only slots whose largest term is within this bound of the least, or whose bound breaks
    // their record, need exponentials.
    let mut bound = nothing;
    let most_more = comptime!((heads as f32).log2() + SLACK);
    let mut growth = 0.0f32;
    #[comptime]
    if let ComptimeOption::Some(records) = &eviction.records {
        growth = records.growth_of(sequence.index);
    }
    // All units run equally many rounds.
    let unit = UNIT_POS as usize;
    let mut from_round = 0usize;
    while from_round < fours {
        let mut own = Array::<Vector<f32, Const<4>>>::new(comptime!(each * heads));
        let mut before = Array::<f32>::new(comptime!(if remembers { each * FOUR } else { 1 }));
        #[unroll]
        for c in 0..each {
            if from_round + comptime!(c * units) < fours {
                let slot = min(from_round + c * units + unit, fours - 1) * FOUR;
                #[unroll]
                for head in 0..heads {
                    own[c * heads + head] =
                        read_four(&eviction.importances, from + head * sequence.stride + slot);
                }
                #[comptime]
                if let ComptimeOption::Some(records) = &eviction.records {
                    #[unroll]
                    for i in 0..FOUR {
                        let slot = candidates_of_cube.first + min(slot + i, count - 1);
                        let new = slot as i32 == candidates_of_cube.newest;
                        before[c * FOUR + i] = records.before(sequence.start + slot, new);
                    }
                }
            }
        }
        let mut tops = Array::<f32>::new(comptime!(each * FOUR));
        let mut least = nothing;
        #[unroll]
        for c in 0..each {
            #[unroll]
            for i in 0..FOUR {
                tops[c * FOUR + i] = nothing;
            }
            if from_round + comptime!(c * units) < fours {
                #[unroll]
                for i in 0..FOUR {
                    let slot = (from_round + c * units + unit) * FOUR + i;
                    let lowest = f32::new(LOWEST_LOGIT);
                    let mut top = lowest;
                    #[unroll]
                    for head in 0..heads {
                        top = max(top, own[c * heads + head].extract(i));
                    }
                    let mut goes = slot < count && top > lowest;
                    if comptime!(spares_newest && !remembers) {
                        goes = goes
                            && (candidates_of_cube.first + slot) as i32
                                != candidates_of_cube.newest;
                    }
                    tops[c * FOUR + i] = select(goes, top, nothing);
                    least = min(least, tops[c * FOUR + i]);
                }
            }
        }
        if comptime!(!remembers) {
            let least = number_of_key(least_of_plane(sort_key(least)));
            bound = min(bound, least + most_more);
        }
        #[unroll]
        for c in 0..each {
            #[unroll]
            for i in 0..FOUR {
                let top = tops[c * FOUR + i];
                let slot = (from_round + c * units + unit) * FOUR + i;
                // The record of a slot that has no weight or is NaN may be another token's.
                let mut live = top < nothing;
                if remembers {
                    live = slot < count;
                }
                if live {
                    let mut wanted = top <= bound;
                    if remembers {
                        wanted = top < nothing
                            && natural(top + most_more) + growth > before[c * FOUR + i];
                    }
                    let mut value = top;
                    if comptime!(heads > 1) && wanted {
                        let mut sum = 0.0f32;
                        #[unroll]
                        for head in 0..heads {
                            sum += exp2(own[c * heads + head].extract(i) - top);
                        }
                        value += log2(sum);
                    }
                    #[comptime]
                    if let ComptimeOption::Some(records) = &mut eviction.records {
                        let at = candidates_of_cube.first + slot;
                        let new = at as i32 == candidates_of_cube.newest;
                        let before = before[c * FOUR + i];
                        let record =
                            records.raise(sequence.start + at, before, new, natural(value), growth);
                        value = record;
                        wanted = !(new && spares_newest);
                    }
                    // Slots ascend, so `<` keeps the lowest of equal slots.
                    if wanted && value < best {
                        best = value;
                        best_slot = slot;
                    }
                }
            }
        }
        from_round += comptime!(each * units);
    }
    block_argmin(best, candidates_of_cube.first + best_slot, sums)
}
