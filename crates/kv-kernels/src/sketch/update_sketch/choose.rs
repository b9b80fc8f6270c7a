//! Chooses the victims of a bulk eviction, in one plane.

use cubecl::prelude::*;

use super::kernel_args::ScoredSlots;
use super::search::{SearchedSlots, lowest_of};
use super::victims::{VICTIMS, Victims};
use crate::components::sentinels::NO_INDEX;

/// Slots that a unit reads before it waits for the first.
const SLOTS: usize = 8;

/// A range that evicts slots.
#[derive(CubeType, Clone, Copy)]
pub(super) struct ShrinkingRange {
    /// The range's first slot.
    pub(super) start: usize,
    /// Slots that the range holds.
    pub(super) held: i32,
    /// Slots that the range keeps.
    pub(super) limit: i32,
    /// Tokens at this position or later are kept.
    pub(super) bound: i32,
}

/// Chooses victims, one after another. Positions and scores move at once; keys and values move when
/// all victims are chosen. One plane does it without barriers: each of its units reads and writes
/// its own share of the slots only.
#[cube]
pub(super) fn choose(slots: &mut ScoredSlots, victims: &mut Victims, range: &ShrinkingRange) {
    let (start, limit, bound) = (range.start, range.limit, range.bound);
    let (unit, units) = (UNIT_POS_PLANE as usize, PLANE_DIM as usize);
    let mut length = range.held;
    let mut count = 0usize;
    let mut among = true;
    let all = SearchedSlots { start, length: length as usize, bound };
    let mut own = lowest_of(&*slots, &all, unit, units, SLOTS);
    while among && length > limit && count < VICTIMS {
        // The unit that owns the last slot reads it, for the victim's place.
        let last = length - 1i32;
        let keeper = last as u32 % PLANE_DIM;
        let from = start + last as usize;
        let last_token = plane_shuffle(slots.positions[from], keeper);
        let last_score = plane_shuffle(slots.scores[from], keeper);
        let least = plane_min(own.value);
        let victim = plane_min(select(own.value == least, own.at, i32::new(NO_INDEX as i64)));
        among = victim != NO_INDEX;
        if among {
            let holds = victim as usize % units == unit;
            if holds {
                let to = start + victim as usize;
                victims.places[count] = victim;
                victims.tokens[count] = slots.positions[to];
                victims.scores[count] = least;
                slots.positions[to] = last_token;
                slots.scores[to] = last_score;
            }
            length = last;
            count += 1;
            // All units search again, though few have lost a slot: a plane's units wait for each
            // other anyway.
            let left = SearchedSlots { start, length: length as usize, bound };
            own.set(lowest_of(&*slots, &left, unit, units, SLOTS));
        }
    }
    if !among {
        // All slots are recent, as in a sequence that has ended and stays at its position. The last
        // slots are dropped, and not added to the sketch.
        length = limit;
    }
    if unit == 0 {
        victims.state[0] = length;
        victims.state[1] = count as i32;
    }
}

/// The place where a slot's row stood before the first of `moves` moves, in a range of `held`
/// slots. Each move brought the last remaining slot to one of `places`.
#[cube]
pub(super) fn source_of(places: &Shared<[i32]>, slot: i32, moves: usize, held: i32) -> i32 {
    let mut source = slot;
    for back in 0..moves {
        let earlier = moves - 1 - back;
        if places[earlier] == source {
            source = held - 1i32 - earlier as i32;
        }
    }
    source
}
