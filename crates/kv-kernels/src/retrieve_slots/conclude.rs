//! The end of a range's step: a new set or an entry kept, and what the step reads, written down and
//! counted.

use cubecl::prelude::*;

use super::decide::Decision;
use super::ends::below;
use super::kernel::Blueprint;
use super::sight::{Outset, Sight};
use super::table::*;

/// What a step reads: sinks, tokens listed in the table, and all slots from a local one on.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Chosen {
    pub(crate) sinks: usize,
    /// Where in the table's row the tokens are, and how many.
    pub(crate) first: usize,
    pub(crate) count: usize,
    /// The first local slot, counted from the range's first.
    pub(crate) local: usize,
    /// What a token's index is ahead of its slot.
    pub(crate) freed: usize,
}

/// All that is in sight.
#[cube]
pub(super) fn all_of(sight: &Sight) -> Chosen {
    Chosen {
        sinks: sight.sinks,
        first: 0usize,
        count: 0usize,
        local: sight.start,
        freed: sight.freed,
    }
}

/// Writes what a step reads of a list, and counts.
#[cube]
pub(super) fn conclude(
    table: &mut [i32],
    own: usize,
    sight: &Sight,
    decision: &Decision,
    set: usize,
    #[comptime] blueprint: Blueprint,
) -> Chosen {
    let (sets, width) = comptime!((blueprint.sets, blueprint.width));
    let decided = decision.decided;
    let totals = Totals::of(&*table, own);
    let fields = own + FIELDS + set * SET_FIELDS;
    let key_norm = table[fields + KEY_NORM];
    let mut dropped = table[fields + DROPPED];
    let some = decided != i32::new(ALL as i64);
    let retrieves = decided == i32::new(RETRIEVES as i64);
    let mut chosen = all_of(sight);
    if comptime!(blueprint.reads_choice) && retrieves {
        // All of it is in sight, and none of it local.
        chosen.first = comptime!(list(sets, width, sets)).runtime();
        chosen.count = decision.choice;
        chosen.local = sight.local;
        dropped = i32::reinterpret(decision.dropped_now);
    } else if some {
        let list = comptime!(list(sets, width, 0)) + set * width;
        let from = i32::cast_from(sight.start + sight.freed);
        let to = i32::cast_from(sight.local + sight.freed);
        // Tokens ascend: those out of sight come first, those that are locals by now last.
        let (hidden, known) = below(&*table, own + list, decision.count, from, to, blueprint);
        chosen.first = list + hidden as usize;
        chosen.count = (known - hidden) as usize;
        chosen.local = sight.local;
    }
    if UNIT_POS == 0 {
        if some {
            table[own + OWN_KEY_NORM] = key_norm;
            table[own + OWN_DROPPED] = dropped;
        }
        write_step(table, own, sight, decided, decision.distance, &chosen, &totals);
    }
    chosen
}

/// What a range's steps have come to.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Totals {
    steps: i32,
    retrieved: i32,
    tokens: i32,
    tokens_high: i32,
}

#[cube]
impl Totals {
    pub(super) fn of(table: &[i32], own: usize) -> Totals {
        Totals {
            steps: table[own + STEPS],
            retrieved: table[own + RETRIEVED],
            tokens: table[own + TOKENS],
            tokens_high: table[own + TOKENS_HIGH],
        }
    }
}

/// Writes down what a step reads, by one unit.
#[cube]
pub(super) fn write_step(
    table: &mut [i32],
    own: usize,
    sight: &Sight,
    decided: i32,
    distance: f32,
    chosen: &Chosen,
    totals: &Totals,
) {
    table[own + DECIDED] = decided;
    table[own + DISTANCE] = i32::reinterpret(distance);
    table[own + FIRST] = i32::cast_from(chosen.first);
    table[own + READ] = i32::cast_from(chosen.count);
    table[own + LOCAL] = i32::cast_from(chosen.local);
    table[own + SEEN] = i32::cast_from(sight.start);
    table[own + FREED] = i32::cast_from(sight.freed);
    table[own + STEPS] = totals.steps + 1i32;
    let retrieves = decided == i32::new(RETRIEVES as i64);
    table[own + RETRIEVED] = totals.retrieved + select(retrieves, 1i32, 0i32);
    let read = sight.sinks + chosen.count + sight.length - chosen.local;
    let tokens = totals.tokens + i32::cast_from(read);
    table[own + TOKENS] = tokens & comptime!((1i32 << TOKEN_BITS) - 1);
    table[own + TOKENS_HIGH] = totals.tokens_high + (tokens >> comptime!(TOKEN_BITS as i32));
}

/// Notes what a new set is of, and that the block has it.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn keep<F: Float>(
    vectors: &[F],
    set_vectors: &mut [f32],
    norms: &[f32],
    table: &mut [i32],
    outset: &Outset,
    pair: usize,
    set: usize,
    count: usize,
    dropped: f32,
    scored_parts: usize,
    #[comptime] blueprint: Blueprint,
) {
    let (own, top) = (outset.own, outset.top);
    enter::<F>(vectors, set_vectors, pair, set, blueprint);
    if UNIT_POS == 0 {
        let fields = own + FIELDS + set * SET_FIELDS;
        table[fields + COUNT] = i32::cast_from(count);
        table[fields + LIST] = i32::cast_from(set);
        if comptime!(blueprint.certified) {
            let mut most = 0.0f32;
            for part in 0..scored_parts {
                most = max(most, norms[pair * scored_parts + part]);
            }
            table[fields + KEY_NORM] = i32::reinterpret(most.sqrt());
            table[fields + DROPPED] = i32::reinterpret(dropped);
        }
        let wanted = table[own + WANTED] as usize;
        if wanted > 0 {
            // Half of what is amiss, and at least one.
            let mut next = top + (wanted - min(count, wanted)).div_ceil(2);
            if count > wanted {
                let less = (count - wanted).div_ceil(2);
                next = top - min(less, top);
            }
            table[own + TOP] = i32::cast_from(max(min(next, wanted), 1usize));
        }
        table[own + BLOCK] = outset.block;
        table[own + SETS] = i32::cast_from(set + 1);
    }
}

/// Keeps the vectors of an entry.
#[cube]
fn enter<F: Float>(
    vectors: &[F],
    set_vectors: &mut [f32],
    pair: usize,
    entry: usize,
    #[comptime] blueprint: Blueprint,
) {
    let sets = blueprint.sets.comptime();
    let parts = comptime!(blueprint.parts * blueprint.length);
    if comptime!(blueprint.shares) {
        let mut i = UNIT_POS as usize;
        while i < parts {
            set_vectors[(pair * sets + entry) * parts + i] =
                f32::cast_from(vectors[pair * parts + i]);
            i += blueprint.units.comptime();
        }
    }
}

/// Keeps the entry of a step that shares, where later steps are compared with it too. All must have
/// compared.
#[cube]
pub(super) fn keep_shared<F: Float>(
    vectors: &[F],
    set_vectors: &mut [f32],
    table: &mut [i32],
    outset: &Outset,
    pair: usize,
    decided: i32,
    #[comptime] blueprint: Blueprint,
) {
    if comptime!(blueprint.chains && blueprint.shares) && decided >= 0 {
        let entry = min(outset.held, comptime!(blueprint.sets - 1));
        enter::<F>(vectors, set_vectors, pair, entry, blueprint);
        if UNIT_POS == 0 {
            let own = outset.own;
            let from = own + FIELDS + decided as usize * SET_FIELDS;
            let to = own + FIELDS + entry * SET_FIELDS;
            #[unroll]
            for field in 0..SET_FIELDS {
                table[to + field] = table[from + field];
            }
            table[own + BLOCK] = outset.block;
            table[own + SETS] = i32::cast_from(entry + 1);
        }
    }
}
