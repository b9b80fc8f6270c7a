//! Finds the slot of a range that takes the victim: the one whose key has the highest cosine with
//! the victim's key, if that is similar enough, else one that takes any victim.

use cubecl::prelude::*;

use super::blueprint::Blueprint;
use crate::components::argmin::block_argmin;
use crate::components::sentinels::{NO_INDEX, NO_MINIMUM};
use crate::merge::takes::{TAKES_ANY, TAKES_SIMILAR};

/// The last round of a range, with which the search begins.
#[cube]
pub(super) fn last_round(length: usize, #[comptime] blueprint: Blueprint) -> usize {
    (length - 1) / comptime!(blueprint.units / blueprint.team * blueprint.ahead)
}

/// Reads the keys that a team compares in a round. A unit gets its own columns of each key.
#[cube]
pub(super) fn keys_of_round<F: Float, N: Size>(
    keys: &[Vector<F, N>],
    start: usize,
    length: usize,
    round: usize,
    #[comptime] blueprint: Blueprint,
) -> Array<Vector<F, N>> {
    let (columns, team_size) = comptime!((blueprint.columns, blueprint.team));
    let own = blueprint.own().comptime();
    let ahead = blueprint.ahead.comptime();
    let unit = UNIT_POS as usize;
    let (member, team) = (unit % team_size, unit / team_size);
    let teams = comptime!(blueprint.units / team_size);
    let mut held = Array::<Vector<F, N>>::new(comptime!(ahead * own));
    #[unroll]
    for a in 0..ahead {
        let slot_in_head = min((round * ahead + a) * teams + team, length - 1);
        #[unroll]
        for c in 0..own {
            let column = min(member + c * team_size, comptime!(columns - 1));
            held[a * own + c] = keys[(start + slot_in_head) * columns + column];
        }
    }
    held
}

/// Returns the place in the range of the slot that takes the victim; [`NO_INDEX`] where none does.
/// A unit has its columns of the victim's key `q`. `k` holds the keys of the [`last_round`].
#[cube]
pub(super) fn most_alike<F: Float, N: Size>(
    keys: &[Vector<F, N>],
    takes: &[f32],
    k: &mut Array<Vector<F, N>>,
    q: &Array<Vector<f32, N>>,
    search: &Search,
    #[comptime] blueprint: Blueprint,
) -> i32 {
    let own = blueprint.own().comptime();
    let ahead = blueprint.ahead.comptime();
    let mut best = Best { distance: f32::new(NO_MINIMUM), slot: i32::new(NO_INDEX as i64) };
    // Rounds descend, since the keys that attention has read last may still be in a cache.
    let mut round = last_round(search.length, blueprint);
    while round > 0 {
        let next = keys_of_round(keys, search.start, search.length, round - 1, blueprint);
        compare(&*k, q, takes, search, &mut best, round, blueprint);
        #[unroll]
        for i in 0..comptime!(ahead * own) {
            k[i] = next[i];
        }
        round -= 1;
    }
    compare(&*k, q, takes, search, &mut best, 0, blueprint);
    let (_, slot) = block_argmin(best.distance, best.slot, blueprint.planes);
    slot
}

/// One over the norm of a key, 0 for a key of zeros. `q` holds the key's columns that this unit
/// has.
#[cube]
pub(super) fn inverse_norm<N: Size>(
    q: &Array<Vector<f32, N>>,
    #[comptime] blueprint: Blueprint,
) -> f32 {
    let team_size = blueprint.team.comptime();
    let own = blueprint.own().comptime();
    let mut square = 0.0f32;
    #[unroll]
    for c in 0..own {
        square += q[c].dot(q[c]);
    }
    #[unroll]
    for level in 0..comptime!(team_size.ilog2()) {
        square += plane_shuffle_xor(square, comptime!(1u32 << level));
    }
    select(square > f32::new(f32::MIN_POSITIVE), square.inverse_sqrt(), 0.0f32)
}

/// The victim, with which keys are compared.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Search {
    /// One over the norm of the victim's key.
    pub(super) scale: f32,
    /// The first slot of the range.
    pub(super) start: usize,
    /// Slots of the range.
    pub(super) length: usize,
    /// The victim's place in the range.
    pub(super) victim: usize,
    /// The cosine that a similar key exceeds.
    pub(super) threshold: f32,
}

/// The slot that takes the victim, of those that a unit has compared.
#[derive(CubeType, Clone, Copy)]
struct Best {
    /// The negated cosine; of a slot that takes any victim, the negated threshold.
    distance: f32,
    /// The slot's place in the range.
    slot: i32,
}

/// Compares a round's keys with the best so far.
#[cube]
fn compare<F: Float, N: Size>(
    k: &Array<Vector<F, N>>,
    q: &Array<Vector<f32, N>>,
    takes: &[f32],
    search: &Search,
    best: &mut Best,
    round: usize,
    #[comptime] blueprint: Blueprint,
) {
    let (columns, team_size) = comptime!((blueprint.columns, blueprint.team));
    let own = blueprint.own().comptime();
    let ahead = blueprint.ahead.comptime();
    let teams = comptime!(blueprint.units / team_size);
    let unit = UNIT_POS as usize;
    let (member, team) = (unit % team_size, unit / team_size);
    let mut dots = Array::<f32>::new(ahead);
    let mut squares = Array::<f32>::new(ahead);
    #[unroll]
    for a in 0..ahead {
        let mut dot = 0.0f32;
        let mut square = 0.0f32;
        #[unroll]
        for c in 0..own {
            let mut key = Vector::<f32, N>::cast_from(k[a * own + c]);
            if comptime!(!columns.is_multiple_of(team_size)) && member + c * team_size >= columns {
                key = Vector::new(0.0f32);
            }
            dot += key.dot(q[c]);
            square += key.dot(key);
        }
        dots[a] = dot;
        squares[a] = square;
    }
    let first = shared_out(&mut dots, &mut squares, ahead, team_size);
    let left = comptime!((ahead / team_size).max(1));
    #[unroll]
    for i in 0..left {
        let a = comptime!(left - 1 - i);
        let slot_in_head = (round * ahead + first + a) * teams + team;
        let cosine = dots[a] * search.scale * squares[a].inverse_sqrt();
        // A key of zeros has cosine 0 with every key.
        let mut distance = select(squares[a] > f32::new(f32::MIN_POSITIVE), -cosine, 0.0f32);
        let mut fits = -distance > search.threshold;
        if comptime!(blueprint.choosy) {
            // A slot that takes any victim comes behind all that are similar enough.
            let takes = takes[search.start + min(slot_in_head, search.length - 1)];
            let any = takes == f32::new(TAKES_ANY);
            fits = any || (fits && takes == f32::new(TAKES_SIMILAR));
            distance = select(any, -search.threshold, distance);
        }
        // Places descend, so `<=` keeps the lowest of equal places.
        let live = slot_in_head < search.length && slot_in_head != search.victim;
        let better = live && fits && distance <= best.distance;
        best.distance = select(better, distance, best.distance);
        best.slot = select(better, i32::cast_from(slot_in_head), best.slot);
    }
}

/// Sums over a team's units, and leaves each unit some of the sums, in its first elements: those
/// from the returned index on. In each step a unit hands half of its sums to another unit, so that
/// half as many are left to add.
#[cube]
fn shared_out(
    dots: &mut Array<f32>,
    squares: &mut Array<f32>,
    #[comptime] count: usize,
    #[comptime] team_size: usize,
) -> usize {
    let member = UNIT_POS as usize % team_size;
    let mut first = 0usize;
    #[unroll]
    for level in 0..comptime!(team_size.ilog2()) {
        let stride = comptime!(1u32 << level);
        let left = comptime!((count >> level).max(1));
        if comptime!(left > 1) {
            let half = comptime!(left / 2);
            let upper = (member >> comptime!(level as usize)) % 2 == 1;
            #[unroll]
            for a in 0..half {
                let (dot, square) = (
                    select(upper, dots[a], dots[a + half]),
                    select(upper, squares[a], squares[a + half]),
                );
                dots[a] = select(upper, dots[a + half], dots[a]) + plane_shuffle_xor(dot, stride);
                squares[a] = select(upper, squares[a + half], squares[a])
                    + plane_shuffle_xor(square, stride);
            }
            first += select(upper, half, 0usize);
        } else {
            dots[0] += plane_shuffle_xor(dots[0], stride);
            squares[0] += plane_shuffle_xor(squares[0], stride);
        }
    }
    first
}
