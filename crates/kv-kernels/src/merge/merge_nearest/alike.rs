//! Finds the slot of a range whose key has the highest cosine with the victim's key.

use cubecl::prelude::*;

use super::blueprint::Blueprint;
use crate::components::argmin::block_argmin;
use crate::components::sentinels::{NO_INDEX, NO_MINIMUM};

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

/// Returns the negated cosine of the key that is most like `q`, and the key's place in the range;
/// [`NO_INDEX`] where the range has only the victim. A unit has its columns of `q`. `k` holds the
/// keys of the [`last_round`].
#[cube]
pub(super) fn most_alike<F: Float, N: Size>(
    keys: &[Vector<F, N>],
    k: &mut Array<Vector<F, N>>,
    q: &Array<Vector<f32, N>>,
    start: usize,
    length: usize,
    victim: usize,
    #[comptime] blueprint: Blueprint,
) -> (f32, i32) {
    let team_size = blueprint.team.comptime();
    let own = blueprint.own().comptime();
    let ahead = blueprint.ahead.comptime();
    let mut square = 0.0f32;
    #[unroll]
    for c in 0..own {
        square += q[c].dot(q[c]);
    }
    #[unroll]
    for level in 0..comptime!(team_size.ilog2()) {
        square += plane_shuffle_xor(square, comptime!(1u32 << level));
    }
    let scale = select(square > f32::new(f32::MIN_POSITIVE), square.inverse_sqrt(), 0.0f32);

    let search = Search { scale, length, victim: victim - start };
    // The least negated cosine. Rounds descend, since the keys that attention has read last may
    // still be in a cache.
    let mut best = f32::new(NO_MINIMUM);
    let mut best_slot = i32::new(NO_INDEX as i64);
    let mut round = last_round(length, blueprint);
    while round > 0 {
        let next = keys_of_round(keys, start, length, round - 1, blueprint);
        let (least, slot_in_head) = compare(&*k, q, &search, best, best_slot, round, blueprint);
        best = least;
        best_slot = slot_in_head;
        #[unroll]
        for i in 0..comptime!(ahead * own) {
            k[i] = next[i];
        }
        round -= 1;
    }
    let (least, slot_in_head) = compare(&*k, q, &search, best, best_slot, 0, blueprint);
    block_argmin(least, slot_in_head, blueprint.planes)
}

/// The victim, with which keys are compared.
#[derive(CubeType, Clone, Copy)]
struct Search {
    /// One over the norm of the victim's key; 0 for a key of zeros.
    scale: f32,
    /// Slots of the range.
    length: usize,
    /// The victim's place in the range.
    victim: usize,
}

/// Compares a round's keys; returns the best so far.
#[cube]
fn compare<F: Float, N: Size>(
    k: &Array<Vector<F, N>>,
    q: &Array<Vector<f32, N>>,
    search: &Search,
    best: f32,
    best_slot: i32,
    round: usize,
    #[comptime] blueprint: Blueprint,
) -> (f32, i32) {
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
    let mut least = best;
    let mut least_slot = best_slot;
    #[unroll]
    for i in 0..left {
        let a = comptime!(left - 1 - i);
        let slot_in_head = (round * ahead + first + a) * teams + team;
        let cosine = dots[a] * search.scale * squares[a].inverse_sqrt();
        // A key of zeros has cosine 0 with every key.
        let distance = select(squares[a] > f32::new(f32::MIN_POSITIVE), -cosine, 0.0f32);
        // Places descend, so `<=` keeps the lowest of equal places.
        let better =
            slot_in_head < search.length && slot_in_head != search.victim && distance <= least;
        least = select(better, distance, least);
        least_slot = select(better, i32::cast_from(slot_in_head), least_slot);
    }
    (least, least_slot)
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
