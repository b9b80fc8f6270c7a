//! A set of the highest scores, and of the neighbours of the best.

use cubecl::prelude::*;

use super::ScoreReduction;
use super::kernel::Blueprint;
use super::list::{Listed, Lists, list_marked};
use super::marks::{compared, lowest_bits, own_words};
use super::radix::edges;
use super::sight::Sight;
use super::table::{DILATED, ROUNDING, TOP};
use crate::barrier::sync_memory;
use crate::decode_attention::shared::{LOWEST, larger};
use crate::scan::exclusive;
use crate::select::high_of;

/// Orders scores, finds the highest of them, and lists their tokens: [`order_all`],
/// [`mark_highest`], [`list_marked`].
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn retrieve(
    logits: &[f32],
    keys: &mut [u32],
    base: usize,
    marks: &mut [u32],
    marked: usize,
    words: usize,
    table: &mut [i32],
    sums: &Array<f32>,
    pair: usize,
    stride: usize,
    sight: &Sight,
    lists: &Lists,
    wanted: &Wanted,
    radius: usize,
    block: usize,
    hidden: u32,
    #[comptime] blueprint: Blueprint,
) -> Listed {
    if comptime!(!blueprint.direct()) {
        order_all(logits, keys, base, sums, pair, stride, sight, blueprint);
    }
    sync_scratch(blueprint);
    mark_highest(&*keys, base, marks, marked, words, sight, wanted, blueprint);
    sync_scratch(blueprint);
    list_marked(
        logits, marks, marked, words, table, sums, pair, stride, sight, lists, radius, block,
        hidden, false, blueprint,
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
/// `keys` from `base` on, `marks` from `marked` on `[3, words]`, a bit a slot.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn mark_highest(
    keys: &[u32],
    base: usize,
    marks: &mut [u32],
    marked: usize,
    words: usize,
    sight: &Sight,
    wanted: &Wanted,
    #[comptime] blueprint: Blueprint,
) {
    let units = blueprint.units.comptime();
    let (start, local) = (sight.start, sight.local);
    let (top, fewer) = (u32::cast_from(wanted.top), u32::cast_from(wanted.fewer()));
    let (highest, finest) = edges(keys, base, start, local, top, fewer, blueprint);

    // Units have neighbouring words, so that they know their rank among equals where not all of
    // them go in.
    let (first, last) = own_words(local, units);
    let mut parts = Shared::<[u32]>::new_slice(comptime!(blueprint.planes()));
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

/// [`sync_memory`] for ordered scores and marks, wherever they are.
#[cube]
pub(super) fn sync_scratch(#[comptime] blueprint: Blueprint) {
    if comptime!(blueprint.staged > 0) {
        sync_cube();
    } else {
        sync_memory(blueprint.fenced);
    }
}
