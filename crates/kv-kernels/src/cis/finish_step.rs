//! The end of a step for one range. Stores a new set, or an entry for a step that shares; then
//! writes which slots the step attends to, and counts it.

use cubecl::prelude::*;

use super::blueprint::Blueprint;
use super::match_cached_set::Decision;
use super::sorted_bounds::count_below;
use super::table::*;
use super::visible_range::{StepContext, VisibleRange};
use crate::attention::decode::slot_indexer::SetView;
use crate::components::sentinels::{ALL_SLOTS, NEW_SET};

/// The view of a step that reads all visible slots.
#[cube]
pub(super) fn all_of(visible: &VisibleRange) -> SetView {
    SetView {
        sinks: visible.sinks,
        first: 0usize,
        count: 0usize,
        local: visible.start,
        freed: visible.freed,
    }
}

/// Writes which slots a step attends to, and counts them: all visible slots, the tokens of list
/// `set`, or the step's own choice. Returns the view.
#[cube]
pub(super) fn finish_step(
    table: &mut [i32],
    own: usize,
    visible: &VisibleRange,
    decision: &Decision,
    set: usize,
    #[comptime] blueprint: Blueprint,
) -> SetView {
    let (sets, width) = comptime!((blueprint.sets, blueprint.width));
    let decided = decision.decided;
    let totals = Totals::of(&*table, own);
    let some = decided != i32::new(ALL_SLOTS as i64);
    let retrieves = decided == i32::new(NEW_SET as i64);
    let mut chosen = all_of(visible);
    if comptime!(blueprint.reads_choice) && retrieves {
        // All chosen tokens are visible, and none is a local.
        chosen.first = comptime!(list(sets, width, sets)).runtime();
        chosen.count = decision.choice;
        chosen.local = visible.local;
    } else if some {
        let list = comptime!(list(sets, width, 0)) + set * width;
        let local = first_local(&*table, own, visible, set, blueprint);
        let from = i32::cast_from(visible.start + visible.freed);
        let to = i32::cast_from(local + visible.freed);
        // Tokens ascend: hidden tokens come first, and tokens that are still locals come last.
        let (before_window, known) =
            count_below(&*table, own + list, decision.count, from, to, blueprint);
        chosen.first = list + before_window as usize;
        chosen.count = (known - before_window) as usize;
        chosen.local = local;
    }
    if UNIT_POS == 0 {
        write_step(table, own, visible, decided, &chosen, &totals);
    }
    chosen
}

/// The first slot that a step reads as a local where it shares list `set`: the first local one, or
/// the slot that was the first local one when the list was retrieved.
#[cube]
fn first_local(
    table: &[i32],
    own: usize,
    visible: &VisibleRange,
    set: usize,
    #[comptime] blueprint: Blueprint,
) -> usize {
    let mut local = visible.local;
    if comptime!(blueprint.tail) {
        let token = table[own + FIELDS + set * SET_FIELDS + LOCAL_TOKEN];
        let then = max(token - i32::cast_from(visible.freed), 0i32) as usize;
        local = min(local, max(then, local - visible.tail));
    }
    local
}

/// Counters of a range: its steps, its steps that retrieved, and the tokens that all steps attended
/// to.
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

/// Writes the view of a step into the range's row of the table, and advances the counters. One unit
/// calls this.
#[cube]
pub(super) fn write_step(
    table: &mut [i32],
    own: usize,
    visible: &VisibleRange,
    decided: i32,
    chosen: &SetView,
    totals: &Totals,
) {
    table[own + DECIDED] = decided;
    table[own + FIRST] = i32::cast_from(chosen.first);
    table[own + READ] = i32::cast_from(chosen.count);
    table[own + LOCAL] = i32::cast_from(chosen.local);
    table[own + SEEN] = i32::cast_from(visible.start);
    table[own + FREED] = i32::cast_from(visible.freed);
    table[own + STEPS] = totals.steps + 1i32;
    let retrieves = decided == i32::new(NEW_SET as i64);
    table[own + RETRIEVED] = totals.retrieved + select(retrieves, 1i32, 0i32);
    let read = visible.sinks + chosen.count + visible.length - chosen.local;
    let tokens = totals.tokens + i32::cast_from(read);
    table[own + TOKENS] = tokens & comptime!((1i32 << TOKEN_BITS) - 1);
    table[own + TOKENS_HIGH] = totals.tokens_high + (tokens >> comptime!(TOKEN_BITS as i32));
}

/// Stores a new set of `count` tokens as entry `set` of the block: its size, its list and its
/// vectors. Adapts the size of the next retrieval.
#[cube]
pub(super) fn store_set<F: Float>(
    vectors: &[F],
    set_vectors: &mut [f32],
    table: &mut [i32],
    context: &StepContext,
    set: usize,
    count: usize,
    #[comptime] blueprint: Blueprint,
) {
    let (own, top) = (context.own, context.top);
    store_vectors::<F>(vectors, set_vectors, context.kv_head, set, blueprint);
    if UNIT_POS == 0 {
        let fields = own + FIELDS + set * SET_FIELDS;
        table[fields + COUNT] = i32::cast_from(count);
        table[fields + LIST] = i32::cast_from(set);
        table[fields + LOCAL_TOKEN] = i32::cast_from(context.visible.local + context.visible.freed);
        let wanted = table[own + WANTED] as usize;
        if wanted > 0 {
            // Moves by half the difference from the wanted size, rounded up.
            let mut next = top + (wanted - min(count, wanted)).div_ceil(2);
            if count > wanted {
                let less = (count - wanted).div_ceil(2);
                next = top - min(less, top);
            }
            table[own + TOP] = i32::cast_from(max(min(next, wanted), 1usize));
        }
        table[own + BLOCK] = context.block;
        table[own + SETS] = i32::cast_from(set + 1);
    }
}

/// Stores the step's vectors in an entry, so that later steps can be compared with it.
#[cube]
fn store_vectors<F: Float>(
    vectors: &[F],
    set_vectors: &mut [f32],
    kv_head: usize,
    entry: usize,
    #[comptime] blueprint: Blueprint,
) {
    let sets = blueprint.sets.comptime();
    let parts = comptime!(blueprint.parts * blueprint.length);
    if comptime!(blueprint.shares) {
        let mut i = UNIT_POS as usize;
        while i < parts {
            set_vectors[(kv_head * sets + entry) * parts + i] =
                f32::cast_from(vectors[kv_head * parts + i]);
            i += blueprint.units.comptime();
        }
    }
}

/// Stores an entry for a step that shares a set, where later steps may share with such steps. All
/// units must have finished the comparisons.
#[cube]
pub(super) fn store_shared_set<F: Float>(
    vectors: &[F],
    set_vectors: &mut [f32],
    table: &mut [i32],
    context: &StepContext,
    decided: i32,
    #[comptime] blueprint: Blueprint,
) {
    if comptime!(blueprint.chains && blueprint.shares) && decided >= 0 {
        let entry = min(context.held, comptime!(blueprint.sets - 1));
        store_vectors::<F>(vectors, set_vectors, context.kv_head, entry, blueprint);
        if UNIT_POS == 0 {
            let own = context.own;
            let from = own + FIELDS + decided as usize * SET_FIELDS;
            let to = own + FIELDS + entry * SET_FIELDS;
            #[unroll]
            for field in 0..SET_FIELDS {
                table[to + field] = table[from + field];
            }
            table[own + BLOCK] = context.block;
            table[own + SETS] = i32::cast_from(entry + 1);
        }
    }
}
