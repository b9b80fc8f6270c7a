//! The end of a range's step: a new set kept, and what the step reads of its set, written down and counted.

use cubecl::prelude::*;

use super::decide::{Decision, Outset, Sight};
use super::kernel::Blueprint;
use super::marks::CHUNK;
use super::radix::PLANES;
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

/// Writes what the step reads of its set, and counts, by a cube of `units`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn conclude(
    table: &mut [i32],
    own: usize,
    sight: &Sight,
    decision: &Decision,
    set: usize,
    #[comptime] units: usize,
    #[comptime] sets: usize,
    #[comptime] width: usize,
) -> Chosen {
    let decided = decision.decided;
    let totals = Totals::of(&*table, own);
    let fields = own + FIELDS + set * SET_FIELDS;
    let key_norm = table[fields + KEY_NORM];
    let dropped = table[fields + DROPPED];
    let some = decided != i32::new(ALL as i64);
    let mut chosen = all_of(sight);
    if some {
        let list = comptime!(FIELDS + sets * SET_FIELDS) + set * width;
        let from = i32::cast_from(sight.start + sight.freed);
        let to = i32::cast_from(sight.local + sight.freed);
        // Tokens ascend: those out of sight come first, those that are locals by now last.
        let (hidden, known) = below(&*table, own + list, decision.count, from, to, units, width);
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
    table[own + FREED] = i32::cast_from(sight.freed);
    table[own + STEPS] = totals.steps + 1i32;
    let retrieves = decided == i32::new(RETRIEVES as i64);
    table[own + RETRIEVED] = totals.retrieved + select(retrieves, 1i32, 0i32);
    let read = sight.sinks + chosen.count + sight.length - chosen.local;
    let tokens = totals.tokens + i32::cast_from(read);
    table[own + TOKENS] = tokens & comptime!((1i32 << TOKEN_BITS) - 1);
    table[own + TOKENS_HIGH] = totals.tokens_high + (tokens >> comptime!(TOKEN_BITS as i32));
}

/// How many of `count` ascending tokens from `list` on are below `from`, and below `to`.
#[cube]
fn below(
    table: &[i32],
    list: usize,
    count: usize,
    from: i32,
    to: i32,
    #[comptime] units: usize,
    #[comptime] width: usize,
) -> (u32, u32) {
    let mut hidden = 0u32;
    let mut known = 0u32;
    let unit = UNIT_POS as usize;
    let chunk = comptime!(width.div_ceil(units));
    if comptime!(chunk <= CHUNK) {
        // All are read before their number is known.
        let mut tokens = Array::<i32>::new(chunk);
        #[unroll]
        for c in 0..chunk {
            tokens[c] = table[list + min(c * units + unit, comptime!(width - 1))];
        }
        #[unroll]
        for c in 0..chunk {
            let listed = c * units + unit < count;
            hidden += select(listed && tokens[c] < from, 1u32, 0u32);
            known += select(listed && tokens[c] < to, 1u32, 0u32);
        }
        (hidden, known) = over_cube(hidden, known);
    } else {
        // Between a block's steps, few tokens go out of sight, and of a set's few are locals: those at both ends tell,
        // unless all of them are.
        let ends = comptime!(units / 2);
        let (hidden_first, late_last) = ends_beyond(table, list, count, from, to, ends);
        if count > ends && (hidden_first == ends as u32 || late_last == ends as u32) {
            let mut i = unit;
            while i < count {
                let token = table[list + i];
                hidden += select(token < from, 1u32, 0u32);
                known += select(token < to, 1u32, 0u32);
                i += units;
            }
            (hidden, known) = over_cube(hidden, known);
        } else {
            hidden = hidden_first;
            known = count as u32 - late_last;
        }
    }
    (hidden, known)
}

/// How many of the first `ends` tokens are below `from`, and how many of the last ones are not below `to`.
#[cube]
fn ends_beyond(
    table: &[i32],
    list: usize,
    count: usize,
    from: i32,
    to: i32,
    #[comptime] ends: usize,
) -> (u32, u32) {
    let unit = UNIT_POS as usize;
    let leads = unit < ends;
    let rank = select(leads, unit, unit - min(unit, ends));
    let listed = rank < min(count, ends);
    let last = count - min(count, rank + 1);
    let token = table[list + select(leads, select(listed, rank, 0usize), last)];
    over_cube(
        select(leads && listed && token < from, 1u32, 0u32),
        select(!leads && listed && token >= to, 1u32, 0u32),
    )
}

/// Sums over a cube.
#[cube]
fn over_cube(a: u32, b: u32) -> (u32, u32) {
    let mut parts = Shared::<[u32]>::new_slice(comptime!(2 * PLANES));
    let (a, b) = (plane_sum(a), plane_sum(b));
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    // All have read those of before.
    sync_cube();
    if UNIT_POS_PLANE == 0 {
        parts[plane] = a;
        parts[PLANES + plane] = b;
    }
    sync_cube();
    let mut all_a = 0u32;
    let mut all_b = 0u32;
    for other in 0..(CUBE_DIM / PLANE_DIM) as usize {
        all_a += parts[other];
        all_b += parts[PLANES + other];
    }
    (all_a, all_b)
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
    let sets = blueprint.sets.comptime();
    let parts = comptime!(blueprint.parts * blueprint.length);
    let (own, top) = (outset.own, outset.top);
    let unit = UNIT_POS as usize;
    if comptime!(blueprint.shares) {
        let mut i = unit;
        while i < parts {
            set_vectors[(pair * sets + set) * parts + i] =
                f32::cast_from(vectors[pair * parts + i]);
            i += blueprint.units.comptime();
        }
    }
    if unit == 0 {
        let fields = own + FIELDS + set * SET_FIELDS;
        table[fields + COUNT] = i32::cast_from(count);
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
