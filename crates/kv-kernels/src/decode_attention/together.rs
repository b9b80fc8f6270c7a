//! One slot for all heads of a sequence, in the kernel for matrix instructions: each head's cube writes its importances, and
//! the last of them to arrive sums them up.
//!
//! Heads in parts arrive part by part, so that the last cube of each part looks through its own slots alone; the last of
//! the parts concludes. Counters are 0 again behind it.

use cubecl::prelude::*;

use super::meet::{PLANE, Sums};
use super::shared::{LOWEST, larger};
use super::weakest::{LOG2_E, Weighed, ahead, importance, least_of_cube};
use crate::cluster::LARGEST_CLUSTER;
use crate::evicting_attention::weigh::{NOWHERE, next_place};
use crate::nvidia::{arrive_at, exp2, least_of_plane, log2, raise, take_raised};
use crate::select::{high_of, number_of};

/// Numbers that count a sequence's arrivals: one for each part, the least importance of those that are through (two words),
/// and how many parts these are.
pub(crate) const ARRIVALS: usize = 16;
const LEAST: usize = LARGEST_CLUSTER;
const THROUGH: usize = LARGEST_CLUSTER + 2;

/// Importances that a unit reads before it waits for the first: as many as registers hold, as the last cube to arrive waits for
/// little else. Of one head, fewer are enough.
const MOST_READ: usize = 96;
const MOST_SLOTS: usize = 16;

/// A sequence whose heads give up a slot together.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Sequence {
    /// Its number, and its first head's.
    index: usize,
    first: usize,
    /// Importances of a head.
    stride: usize,
    /// Slots that all heads have.
    length: usize,
    /// Whether a slot is to be given up.
    pub(super) full: bool,
}

#[cube]
impl Sequence {
    /// That of a head, from all heads' lengths and limits; `stride` importances are each head's.
    pub(crate) fn of(
        lengths: &[i32],
        limits: &[i32],
        pair: usize,
        stride: usize,
        #[comptime] heads: usize,
    ) -> Sequence {
        let mut sequence =
            Sequence { index: 0usize, first: pair, stride, length: 0usize, full: false };
        if comptime!(heads > 0) {
            sequence.index = pair / heads;
            sequence.first = pair / heads * heads;
            let mut length = lengths[sequence.first];
            #[unroll]
            for head in 0..heads {
                let own = lengths[sequence.first + head];
                length = min(length, own);
                // All cubes of the sequence find the same, even of heads that are not equally long.
                sequence.full = sequence.full || own >= limits[sequence.first + head];
            }
            sequence.length = max(length, 0i32) as usize;
        }
        sequence
    }
}

/// How many heads' cubes have arrived before this one: the unit that asks tells the others.
#[derive(CubeType)]
pub(super) struct Arrival {
    before: Shared<[u32]>,
}

/// Writes a cube's importances, and arrives.
///
/// # Shapes
/// As [`Logits::Weighed`](super::blueprint::Logits::Weighed) says.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn publish(
    totals: &Shared<[f32]>,
    maxima: &Shared<[f32]>,
    weights: &Shared<[f32]>,
    norms: &Array<f32>,
    log_norms: &[f32],
    weighed: &Weighed,
    importances: &mut [f32],
    arrivals: &[f32],
    sequence: &Sequence,
    pair: usize,
    split: usize,
    #[comptime] joined: bool,
    #[comptime] sums: Sums,
) -> Arrival {
    let units = comptime!(sums.planes * PLANE);
    let unit = UNIT_POS as usize;
    let mut before = Shared::<[u32]>::new_slice(1usize);
    if sequence.full {
        let group = sums.group.comptime();
        let mut normalisers = Array::<f32>::new(group);
        #[unroll]
        for g in 0..group {
            normalisers[g] = maxima[g] * LOG2_E + log2(weights[g]);
        }
        let ahead = comptime!(ahead(joined, sums));
        let to = pair * sequence.stride + weighed.first;
        #[unroll]
        for c in 0..ahead {
            let slot = c * units + unit;
            if slot < weighed.count {
                importances[to + slot] =
                    importance(totals, &normalisers, norms[c], slot, weighed, false, group);
            }
        }
        let mut slot = comptime!(ahead * units) + unit;
        while slot < weighed.count {
            let norm = log_norms[weighed.start + weighed.first + slot];
            importances[to + slot] =
                importance(totals, &normalisers, norm, slot, weighed, false, group);
            slot += units;
        }
        sync_cube();
        if unit == 0 {
            before[0] = arrive_at(arrivals, sequence.index * ARRIVALS + split);
        }
    }
    Arrival { before }
}

/// Finds the slot that all heads give up, in the last cube to have arrived, and writes its place for all of them.
///
/// # Shapes
/// As for [`publish`]; `places` `[B, Hkv]`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn give_up_together(
    arrival: &Arrival,
    importances: &[f32],
    arrivals: &mut [f32],
    places: &mut [f32],
    weighed: &Weighed,
    sequence: &Sequence,
    pair: usize,
    length: i32,
    split: usize,
    splits: usize,
    #[comptime] heads: usize,
    #[comptime] spares_newest: bool,
    #[comptime] joined: bool,
    #[comptime] sums: Sums,
) {
    let unit = UNIT_POS as usize;
    if !sequence.full {
        if unit == 0 && split == 0 {
            let nowhere = i32::new(NOWHERE as i64);
            places[pair] = f32::reinterpret(next_place(nowhere, weighed.newest, false, length));
        }
    } else {
        sync_cube();
        if arrival.before[0] == comptime!(heads as u32 - 1) {
            let counters = sequence.index * ARRIVALS;
            let (key, place) =
                least_of_part(importances, weighed, sequence, heads, spares_newest, sums);
            if unit == 0 {
                arrivals[counters + split] = 0.0f32;
                let mut done = true;
                let mut chosen = place;
                if joined {
                    // Inverted, so that 0 is nothing, and the lowest place is the highest among equals.
                    raise(&*arrivals, counters + LEAST, !key, !(place as u32));
                    let through = arrive_at(&*arrivals, counters + THROUGH) as usize;
                    done = through + 1 == splits;
                    if done {
                        let (key, place) = take_raised(&*arrivals, counters + LEAST);
                        arrivals[counters + THROUGH] = 0.0f32;
                        // Of no candidates, the places are nowhere.
                        chosen = select(key == 0, i32::new(NOWHERE as i64), (!place) as i32);
                    }
                }
                if done {
                    let next = next_place(chosen, weighed.newest, true, length);
                    #[unroll]
                    for head in 0..heads {
                        places[sequence.first + head] = f32::reinterpret(next);
                    }
                }
            }
        }
    }
}

/// Of a part's slots the one of the least sum over all heads, as [`least_of_cube`] has it.
#[cube]
fn least_of_part(
    importances: &[f32],
    weighed: &Weighed,
    sequence: &Sequence,
    #[comptime] heads: usize,
    #[comptime] spares_newest: bool,
    #[comptime] sums: Sums,
) -> (u32, i32) {
    let units = comptime!(sums.planes * PLANE);
    let each = comptime!((MOST_READ / heads).clamp(1, MOST_SLOTS));
    let from = sequence.first * sequence.stride + weighed.first;
    let common = sequence.length - min(sequence.length, weighed.first);
    let count = min(weighed.count, common);
    let mut best = f32::new(f32::MAX);
    let mut best_slot = 0usize;
    // What the plane has found before: no sum is below the largest of its terms, so that most slots need no exponentials.
    let mut found = f32::new(f32::MAX);
    // All units go as many rounds.
    let unit = UNIT_POS as usize;
    let mut from_round = 0usize;
    while from_round < count {
        let mut own = Array::<f32>::new(comptime!(each * heads));
        #[unroll]
        for c in 0..each {
            let slot = min(from_round + c * units + unit, count - 1);
            #[unroll]
            for head in 0..heads {
                own[c * heads + head] = importances[from + head * sequence.stride + slot];
            }
        }
        #[unroll]
        for c in 0..each {
            let slot = from_round + c * units + unit;
            let mut top = f32::new(LOWEST);
            let mut there = false;
            #[unroll]
            for head in 0..heads {
                // Slots of no weight add nothing.
                let term = own[c * heads + head];
                let absent = term == f32::new(f32::MAX);
                there = there || !absent;
                own[c * heads + head] = select(absent, f32::new(LOWEST), term);
                top = larger(top, own[c * heads + head]);
            }
            let mut goes = slot < count && there && top < found;
            if spares_newest {
                goes = goes && (weighed.first + slot) as i32 != weighed.newest;
            }
            if goes {
                let mut value = top;
                if comptime!(heads > 1) {
                    let mut sum = 0.0f32;
                    #[unroll]
                    for head in 0..heads {
                        sum += exp2(own[c * heads + head] - top);
                    }
                    value += log2(sum);
                }
                // Slots ascend, so `<` keeps the lowest among equals.
                if value < best {
                    best = value;
                    best_slot = slot;
                }
            }
        }
        found = number_of(least_of_plane(high_of(best)));
        from_round += comptime!(each * units);
    }
    least_of_cube(best, weighed.first + best_slot, sums)
}
