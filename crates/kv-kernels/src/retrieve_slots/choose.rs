//! A set of the highest scores, and of the neighbours of the best.

use cubecl::prelude::*;

use super::ScoreReduction;
use super::decide::{Sight, first_in_sight};
use super::kernel::Blueprint;
use super::marks::{WORD, compared, lowest_bits, own_words, shifted, within};
use super::radix::{PLANES, edges, exclusive};
use super::table::{DILATED, ROUNDING, TOP};
use crate::decode_attention::shared::{LOWEST, larger};
use crate::select::high_of;

/// Orders scores, finds the highest of them, and lists their tokens: [`order_all`], [`mark_highest`], [`list_marked`].
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn retrieve(
    logits: &[f32],
    keys: &mut [u32],
    base: usize,
    marks: &mut [u32],
    marked: usize,
    table: &mut [i32],
    sums: &Array<f32>,
    pair: usize,
    stride: usize,
    sight: &Sight,
    to: usize,
    wanted: &Wanted,
    radius: usize,
    block: usize,
    hidden: u32,
    #[comptime] blueprint: Blueprint,
) -> (usize, f32) {
    if comptime!(!blueprint.direct()) {
        order_all(logits, keys, base, sums, pair, stride, sight, blueprint);
    }
    settle_scratch(blueprint);
    mark_highest(&*keys, base, marks, marked, stride, sight, wanted, blueprint);
    settle_scratch(blueprint);
    list_marked(
        logits, marks, marked, table, sums, pair, stride, sight, to, radius, block, hidden,
        blueprint,
    )
}

/// How many slots a set begins with, and how many of them bring their neighbours along.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) top: usize,
    pub(super) dilated: usize,
}

#[cube]
impl Wanted {
    /// The best of them, of which there is one, whether or not it brings its neighbours along.
    pub(super) fn fewer(&self) -> usize {
        max(min(self.dilated, self.top), 1usize)
    }
}

/// What a range retrieves.
#[cube]
pub(super) fn wanted_of(table: &[i32], own: usize) -> Wanted {
    let top = table[own + TOP] as usize;
    let share = f32::reinterpret(table[own + DILATED]);
    let dilated = min((f32::cast_from(top) * share + ROUNDING) as usize, top);
    Wanted { top, dilated }
}

/// One score of a slot's logits, a logarithm: the largest of its weights, or their sum.
#[cube]
pub(super) fn score_of(
    logits: &Array<f32>,
    sums: &Array<f32>,
    #[comptime] blueprint: Blueprint,
) -> f32 {
    let group = blueprint.group.comptime();
    let mut best = f32::new(LOWEST);
    #[unroll]
    for g in 0..group {
        best = larger(best, logits[g] - sums[g]);
    }
    if comptime!(group > 1 && blueprint.reduction == ScoreReduction::Sum) {
        let mut sum = 0.0f32;
        #[unroll]
        for g in 0..group {
            sum += (logits[g] - sums[g] - best).exp();
        }
        best += sum.ln();
    }
    best
}

/// Orders the scores of the slots between sinks and locals.
#[cube]
#[allow(clippy::too_many_arguments)]
fn order_all(
    logits: &[f32],
    keys: &mut [u32],
    base: usize,
    sums: &Array<f32>,
    pair: usize,
    stride: usize,
    sight: &Sight,
    #[comptime] blueprint: Blueprint,
) {
    let group = blueprint.group.comptime();
    let from = pair * group * stride;
    let mut i = sight.start + UNIT_POS as usize;
    while i < sight.local {
        let mut own = Array::<f32>::new(group);
        #[unroll]
        for g in 0..group {
            own[g] = logits[from + g * stride + i];
        }
        keys[base + i] = high_of(score_of(&own, sums, blueprint));
        i += blueprint.units.comptime();
    }
}

/// Marks the highest of ordered scores, ties by the lowest slot, and the best of them.
///
/// # Shapes
/// `keys` from `base` on `[stride]`, `marks` from `marked` on `[3, words]`, a bit a slot.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn mark_highest(
    keys: &[u32],
    base: usize,
    marks: &mut [u32],
    marked: usize,
    stride: usize,
    sight: &Sight,
    wanted: &Wanted,
    #[comptime] blueprint: Blueprint,
) {
    let units = blueprint.units.comptime();
    let (start, local) = (sight.start, sight.local);
    let (top, fewer) = (u32::cast_from(wanted.top), u32::cast_from(wanted.fewer()));
    let (highest, finest) = edges(keys, base, start, local, top, fewer, units);

    // Units have neighbouring words, so that they know their rank among equals where not all of them go in.
    let words = stride.div_ceil(WORD);
    let (first, last) = own_words(local, units);
    let mut parts = Shared::<[u32]>::new_slice(PLANES);
    let room = top - highest.above;
    let room_best = fewer - finest.above;
    let mut rank = 0u32;
    let mut rank_best = 0u32;
    if highest.equal > room || finest.equal > room_best {
        let mut equal = 0u32;
        let mut equal_best = 0u32;
        for word in first..last {
            let own = compared(keys, base, word, start, local, highest.key, finest.key);
            equal += own.equal.count_ones();
            equal_best += own.equal_best.count_ones();
        }
        let (before, _) = exclusive(equal, &mut parts);
        let (before_best, _) = exclusive(equal_best, &mut parts);
        rank = before;
        rank_best = before_best;
    }
    for word in first..last {
        let own = compared(keys, base, word, start, local, highest.key, finest.key);
        marks[marked + word] = own.above | lowest_bits(own.equal, room - min(rank, room));
        let best = lowest_bits(own.equal_best, room_best - min(rank_best, room_best));
        marks[marked + words + word] = select(wanted.dilated == 0, 0u32, own.above_best | best);
        rank += own.equal.count_ones();
        rank_best += own.equal_best.count_ones();
    }
}

/// Writes the tokens of marked slots, and of the neighbours of the best, from `to` on; returns how many there are and
/// the most attention that a query does not give to what is surely attended to until the block ends.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn list_marked(
    logits: &[f32],
    marks: &mut [u32],
    marked: usize,
    table: &mut [i32],
    sums: &Array<f32>,
    pair: usize,
    stride: usize,
    sight: &Sight,
    to: usize,
    radius: usize,
    block: usize,
    hidden: u32,
    #[comptime] blueprint: Blueprint,
) -> (usize, f32) {
    let group = blueprint.group.comptime();
    let units = blueprint.units.comptime();
    let unit = UNIT_POS as usize;
    let (start, local) = (sight.start, sight.local);
    let from = pair * group * stride;
    let words = stride.div_ceil(WORD);
    let mut parts = Shared::<[u32]>::new_slice(PLANES);
    // Neighbours of the best may be locals, which go out of the locals' place with time.
    let reach = min(local + radius, sight.length);
    let known = local.div_ceil(WORD);
    let (first, last) = own_words(reach, units);
    let mut own = 0u32;
    for word in first..last {
        let mut chosen = 0u32;
        if word < known {
            chosen = marks[marked + word];
        }
        for distance in 0..radius + 1 {
            chosen |= shifted(&*marks, marked + words, known, word, distance);
        }
        chosen &= within(word, start, reach);
        marks[marked + 2 * words + word] = chosen;
        own += chosen.count_ones();
    }
    let (before, count) = exclusive(own, &mut parts);
    let mut next = before as usize;
    for word in first..last {
        let mut bits = marks[marked + 2 * words + word];
        while bits > 0 {
            let bit = ((bits - 1) & !bits).count_ones() as usize;
            if next < comptime!(blueprint.width) {
                table[to + next] = i32::cast_from(word * WORD + bit + sight.freed);
            }
            next += 1;
            bits &= bits - 1;
        }
    }

    let mut dropped = 0.0f32;
    if comptime!(blueprint.certified) {
        settle_scratch(blueprint);
        let left = block - 1 - (sight.tokens - min(sight.tokens, 1usize)) % block;
        let ahead = first_in_sight(hidden, sight.tokens + left);
        let later = ahead - min(ahead, sight.freed);
        let stays = min(local + left, sight.length);
        let mut masses = Shared::<[f32]>::new_slice(comptime!(PLANES * group));
        let plane = (UNIT_POS / PLANE_DIM) as usize;
        #[unroll]
        for g in 0..group {
            let mut mass = 0.0f32;
            let mut i = start + unit;
            while i < sight.length {
                let mut kept = i >= stays;
                if !kept && i < reach {
                    let bits = marks[marked + 2 * words + i / WORD];
                    kept = (bits >> u32::cast_from(i % WORD)) & 1u32 > 0;
                }
                if !kept || i < later {
                    mass += (logits[from + g * stride + i] - sums[g]).exp();
                }
                i += units;
            }
            mass = plane_sum(mass);
            if UNIT_POS_PLANE == 0 {
                masses[g * PLANES + plane] = mass;
            }
        }
        sync_cube();
        #[unroll]
        for g in 0..group {
            let mut mass = 0.0f32;
            for other in 0..(CUBE_DIM / PLANE_DIM) as usize {
                mass += masses[g * PLANES + other];
            }
            dropped = max(dropped, mass);
        }
    }
    (min(count as usize, comptime!(blueprint.width)), dropped)
}

/// Waits until what the cube wrote to memory is seen by all of it.
#[cube]
pub(super) fn settle(#[comptime] fenced: bool) {
    if fenced {
        sync_storage();
    } else {
        sync_cube();
    }
}

/// The same for ordered scores and marks, wherever they are.
#[cube]
fn settle_scratch(#[comptime] blueprint: Blueprint) {
    if comptime!(blueprint.staged > 0) {
        sync_cube();
    } else {
        settle(blueprint.fenced);
    }
}
