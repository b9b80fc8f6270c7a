//! The slot of a range whose key is most like the victim's.

use cubecl::prelude::*;

use super::kernel::Blueprint;
use crate::evicting_attention::weigh::{ABSENT, NOWHERE, weakest_of};

/// The negated cosine of the key that is most like `q`, of which a unit has its team's columns, and its place in the
/// range; [`NOWHERE`] where there is but the victim.
#[cube]
pub(super) fn most_alike<F: Float, N: Size>(
    keys: &[Vector<F, N>],
    q: &Array<Vector<f32, N>>,
    start: usize,
    length: usize,
    victim: usize,
    #[comptime] blueprint: Blueprint,
) -> (f32, i32) {
    let columns = blueprint.columns.comptime();
    let team_size = blueprint.team.comptime();
    let own = columns.div_ceil(team_size).comptime();
    let ahead = blueprint.ahead.comptime();
    let teams = comptime!(blueprint.units / team_size);
    let unit = UNIT_POS as usize;
    let (member, team) = (unit % team_size, unit / team_size);
    let mut square = 0.0f32;
    #[unroll]
    for c in 0..own {
        square += q[c].dot(q[c]);
    }
    #[unroll]
    for level in 0..comptime!(team_size.ilog2()) {
        square += plane_shuffle_xor(square, comptime!(1u32 << level));
    }
    let norm = square.sqrt();

    // The least of negated cosines.
    let mut best = f32::new(ABSENT);
    let mut best_place = i32::new(NOWHERE as i64);
    let rounds = length.div_ceil(comptime!(teams * ahead));
    for round in 0..rounds {
        let mut k = Array::<Vector<F, N>>::new(comptime!(ahead * own));
        #[unroll]
        for a in 0..ahead {
            let place = min((round * ahead + a) * teams + team, length - 1);
            #[unroll]
            for c in 0..own {
                let column = min(member + c * team_size, columns - 1);
                k[a * own + c] = keys[(start + place) * columns + column];
            }
        }
        #[unroll]
        for a in 0..ahead {
            let place = (round * ahead + a) * teams + team;
            let mut dot = 0.0f32;
            let mut other = 0.0f32;
            #[unroll]
            for c in 0..own {
                let mut key = Vector::<f32, N>::cast_from(k[a * own + c]);
                if comptime!(!columns.is_multiple_of(team_size))
                    && member + c * team_size >= columns
                {
                    key = Vector::new(0.0f32);
                }
                dot += key.dot(q[c]);
                other += key.dot(key);
            }
            #[unroll]
            for level in 0..comptime!(team_size.ilog2()) {
                dot += plane_shuffle_xor(dot, comptime!(1u32 << level));
                other += plane_shuffle_xor(other, comptime!(1u32 << level));
            }
            let norms = norm * other.sqrt();
            let cosine = select(norms > 0.0f32, dot / norms, 0.0f32);
            // Places ascend, so `<` keeps the first among equals.
            if place < length && start + place != victim && -cosine < best {
                best = -cosine;
                best_place = i32::cast_from(place);
            }
        }
    }
    weakest_of(best, best_place, blueprint.planes)
}
