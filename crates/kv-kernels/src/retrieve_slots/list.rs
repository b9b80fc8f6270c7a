//! A set's tokens, listed from marks.

use cubecl::prelude::*;

use super::choose::sync_scratch;
use super::kernel::Blueprint;
use super::marks::{WORD, own_words, shifted, within};
use super::sight::{Sight, first_in_sight};
use crate::scan::exclusive;

/// What is listed of a set, and of the step's own choice.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Listed {
    /// Tokens in the list, which has room for the first ones.
    pub(super) count: usize,
    /// Tokens that should be.
    pub(super) marked: usize,
    /// The most attention that a query does not give to what is surely attended to until the block
    /// ends.
    pub(super) dropped: f32,
    /// Tokens in the list of the choice, where the step reads that instead of its set.
    pub(super) chosen: usize,
    /// The most attention that a query does not give to what the step then reads.
    pub(super) dropped_now: f32,
}

/// Where the tokens of a set go in the table, and those of the step's own choice.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Lists {
    pub(super) set: usize,
    pub(super) choice: usize,
}

/// Writes the tokens of marked slots, and of the neighbours of the best, to the set's list, and
/// where the step reads its own choice, the tokens of marked slots alone to that list. Where the
/// cube `gathers` tokens, they go to memory side by side.
///
/// # Shapes
/// `marks` from `marked` on `[3, words]`, a bit a slot.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn list_marked(
    logits: &[f32],
    marks: &mut [u32],
    marked: usize,
    words: usize,
    table: &mut [i32],
    sums: &Array<f32>,
    pair: usize,
    stride: usize,
    sight: &Sight,
    lists: &Lists,
    radius: usize,
    block: usize,
    hidden: u32,
    #[comptime] gathers: bool,
    #[comptime] blueprint: Blueprint,
) -> Listed {
    let units = blueprint.units.comptime();
    let width = blueprint.width.comptime();
    let (start, local) = (sight.start, sight.local);
    // Neighbours of the best may be locals, which go out of the locals' place with time.
    let reach = min(local + radius, sight.length);
    let known = local.div_ceil(WORD);
    let (first, last) = own_words(reach, units);
    let set = marked + 2 * words;
    for word in first..last {
        let mut chosen = 0u32;
        if word < known {
            chosen = marks[marked + word];
        }
        for distance in 0..radius + 1 {
            chosen |= shifted(&*marks, marked + words, known, word, distance);
        }
        marks[set + word] = chosen & within(word, start, reach);
    }
    let mut tokens = Shared::<[i32]>::new_slice(comptime!(if gathers { width } else { 1 }));
    let count = write_tokens(
        &*marks,
        set,
        first,
        last,
        sight.freed,
        table,
        lists.set,
        &mut tokens,
        gathers,
        blueprint,
    );
    let mut choice = 0usize;
    if comptime!(blueprint.reads_choice) {
        let last = max(min(last, known), first);
        choice = write_tokens(
            &*marks,
            marked,
            first,
            last,
            sight.freed,
            table,
            lists.choice,
            &mut tokens,
            gathers,
            blueprint,
        );
    }

    let mut dropped = 0.0f32;
    let mut dropped_now = 0.0f32;
    if comptime!(blueprint.certified) {
        sync_scratch(blueprint);
        let left = block - 1 - (sight.tokens - min(sight.tokens, 1usize)) % block;
        let ahead = first_in_sight(hidden, sight.tokens + left);
        let later = ahead - min(ahead, sight.freed);
        let stays = min(local + left, sight.length);
        dropped = mass_of_others(
            logits, &*marks, set, reach, later, stays, sums, pair, stride, sight, blueprint,
        );
        if comptime!(blueprint.reads_choice) {
            dropped_now = mass_of_others(
                logits, &*marks, marked, local, start, local, sums, pair, stride, sight, blueprint,
            );
        }
    }
    Listed {
        count: min(count, width),
        marked: count,
        dropped,
        chosen: min(choice, width),
        dropped_now,
    }
}

/// Writes the tokens of slots that are marked from `from` on to a list, as far as it has room;
/// returns how many there are. A unit has the words from `first` to `last`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn write_tokens(
    marks: &[u32],
    from: usize,
    first: usize,
    last: usize,
    freed: usize,
    table: &mut [i32],
    to: usize,
    tokens: &mut Shared<[i32]>,
    #[comptime] gathers: bool,
    #[comptime] blueprint: Blueprint,
) -> usize {
    let units = blueprint.units.comptime();
    let mut parts = Shared::<[u32]>::new_slice(comptime!(blueprint.planes()));
    let mut own = 0u32;
    for word in first..last {
        own += marks[from + word].count_ones();
    }
    let (before, count) = exclusive(own, &mut parts);
    let listed = min(count as usize, comptime!(blueprint.width));
    let mut next = before as usize;
    for word in first..last {
        let mut bits = marks[from + word];
        while bits > 0 {
            let bit = ((bits - 1) & !bits).count_ones() as usize;
            if next < listed {
                let token = i32::cast_from(word * WORD + bit + freed);
                if gathers {
                    tokens[next] = token;
                } else {
                    table[to + next] = token;
                }
            }
            next += 1;
            bits &= bits - 1;
        }
    }
    if gathers {
        sync_cube();
        let mut i = UNIT_POS as usize;
        while i < listed {
            table[to + i] = tokens[i];
            i += units;
        }
        // Others may gather the next list in the same place.
        sync_cube();
    }
    count as usize
}

/// The most attention that a query gives to what is in sight and not kept: slots before `later`,
/// and those before `stays` that are not marked, from `marked` on, of the first `reach` slots. All
/// know it.
#[cube]
#[allow(clippy::too_many_arguments)]
fn mass_of_others(
    logits: &[f32],
    marks: &[u32],
    marked: usize,
    reach: usize,
    later: usize,
    stays: usize,
    sums: &Array<f32>,
    pair: usize,
    stride: usize,
    sight: &Sight,
    #[comptime] blueprint: Blueprint,
) -> f32 {
    let group = blueprint.group.comptime();
    let (units, planes) = comptime!((blueprint.units, blueprint.planes()));
    let from = pair * group * stride;
    let mut masses = Shared::<[f32]>::new_slice(comptime!(planes * group));
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    #[unroll]
    for g in 0..group {
        let mut mass = 0.0f32;
        let mut i = sight.start + UNIT_POS as usize;
        while i < sight.length {
            let mut kept = i >= stays;
            if !kept && i < reach {
                let bits = marks[marked + i / WORD];
                kept = (bits >> u32::cast_from(i % WORD)) & 1u32 > 0;
            }
            if !kept || i < later {
                mass += (logits[from + g * stride + i] - sums[g]).exp();
            }
            i += units;
        }
        mass = plane_sum(mass);
        if UNIT_POS_PLANE == 0 {
            masses[g * planes + plane] = mass;
        }
    }
    sync_cube();
    let mut most = 0.0f32;
    #[unroll]
    for g in 0..group {
        let mut mass = 0.0f32;
        for other in 0..(CUBE_DIM / PLANE_DIM) as usize {
            mass += masses[g * planes + other];
        }
        most = max(most, mass);
    }
    most
}
