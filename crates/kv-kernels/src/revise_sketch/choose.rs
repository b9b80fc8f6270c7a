//! The victims of a bulk, chosen by one plane among the lowest scores that all planes have found.

use cubecl::prelude::*;

use super::evict::VICTIMS;
use super::search::{Weakest, lowest_of};
use crate::evicting_attention::weigh::{ABSENT as INFINITE, NOWHERE};

/// Slots that a unit reads before it waits for the first.
const SLOTS: usize = 8;
/// Lowest scores that are kept: each unit of a plane has its part of a range in as many groups as that allows.
const LOWS: usize = 1024;

/// The lowest score of each group of slots. A plane's units take turns at slots, and at groups of them.
#[derive(CubeType)]
pub(super) struct Lows {
    values: Shared<[f32]>,
    /// [`NOWHERE`] where a group has none.
    at: Shared<[i32]>,
}

#[cube]
impl Lows {
    pub(super) fn new() -> Lows {
        Lows { values: Shared::new_slice(LOWS), at: Shared::new_slice(LOWS) }
    }

    /// Slots of all units' groups of a number, in a range of `length`.
    fn span(length: usize) -> usize {
        let turn = comptime!(SLOTS).runtime() * PLANE_DIM as usize;
        let groups = comptime!(LOWS).runtime() / PLANE_DIM as usize;
        length.div_ceil(turn * groups) * turn
    }

    /// Finds a unit's lowest score anew, in its group of this number.
    fn find(
        &mut self,
        slot_scores: &[f32],
        positions: &[i32],
        start: usize,
        length: usize,
        bound: i32,
        group: usize,
        span: usize,
    ) {
        let (unit, units) = (UNIT_POS_PLANE as usize, PLANE_DIM as usize);
        let first = group * span;
        let end = min(first + span, length);
        let low =
            lowest_of(slot_scores, positions, start, end, bound, first + unit, units, SLOTS);
        self.values[group * units + unit] = low.value;
        self.at[group * units + unit] = low.at;
    }

    /// The lowest of a unit's first `groups`.
    fn lowest(&self, groups: usize) -> Weakest {
        let (unit, units) = (UNIT_POS_PLANE as usize, PLANE_DIM as usize);
        let mut value = f32::new(INFINITE);
        let mut at = i32::new(NOWHERE as i64);
        for group in 0..groups {
            let other = self.values[group * units + unit];
            if other < value {
                value = other;
                at = self.at[group * units + unit];
            }
        }
        Weakest { value, at }
    }
}

/// Finds the lowest scores of a range's groups: planes take turns at them. Units of other planes see them behind a
/// barrier.
#[cube]
pub(super) fn find_lows(
    lows: &mut Lows,
    slot_scores: &[f32],
    positions: &[i32],
    start: usize,
    length: usize,
    bound: i32,
    #[comptime] units: usize,
) {
    let span = Lows::span(length);
    let mut group = UNIT_POS as usize / PLANE_DIM as usize;
    while group < length.div_ceil(span) {
        lows.find(slot_scores, positions, start, length, bound, group, span);
        group += comptime!(units).runtime() / PLANE_DIM as usize;
    }
}

/// Chooses victims, one after another: positions and scores move at once, keys and values when all are chosen. Left to
/// one plane, whose units need no barrier: each reads and writes every so many of the slots, and only these.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn choose(
    lows: &mut Lows,
    positions: &mut [i32],
    slot_scores: &mut [f32],
    places: &mut Shared<[i32]>,
    tokens: &mut Shared<[i32]>,
    scores: &mut Shared<[f32]>,
    state: &mut Shared<[i32]>,
    start: usize,
    held: i32,
    limit: i32,
    bound: i32,
) {
    let (unit, units) = (UNIT_POS_PLANE as usize, PLANE_DIM as usize);
    let span = Lows::span(held as usize);
    let groups = (held as usize).div_ceil(span);
    let mut length = held;
    let mut count = 0usize;
    let mut among = true;
    let mut own = lows.lowest(groups);
    while among && length > limit && count < VICTIMS {
        // What takes the victim's place is read by whom it belongs to.
        let last = length - 1i32;
        let keeper = last as u32 % PLANE_DIM;
        let from = start + last as usize;
        let last_token = plane_shuffle(positions[from], keeper);
        let last_score = plane_shuffle(slot_scores[from], keeper);
        let least = plane_min(own.value);
        let victim = plane_min(select(own.value == least, own.at, i32::new(NOWHERE as i64)));
        among = victim != NOWHERE;
        if among {
            if victim as usize % units == unit {
                let to = start + victim as usize;
                places[count] = victim;
                tokens[count] = positions[to];
                scores[count] = least;
                positions[to] = last_token;
                slot_scores[to] = last_score;
                let group = victim as usize / span;
                lows.find(&*slot_scores, &*positions, start, last as usize, bound, group, span);
                own.set(lows.lowest(groups));
            }
            // The last was its group's lowest where it is of a low score itself: seldom.
            let group = last as usize / span;
            if keeper as usize == unit && lows.at[group * units + unit] == last {
                lows.find(&*slot_scores, &*positions, start, last as usize, bound, group, span);
                own.set(lows.lowest(groups));
            }
            length = last;
            count += 1;
        }
    }
    if !among {
        // All are recent, as those of a sequence that has ended and stays where it is: the last go, and nothing
        // remembers them.
        length = limit;
    }
    if unit == 0 {
        state[0] = length;
        state[1] = count as i32;
    }
}

/// Where a slot's row stood when a range of `held` slots began to move, before its `moves`-th move: each brought the
/// last of those left to one of `places`.
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
