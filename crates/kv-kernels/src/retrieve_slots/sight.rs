//! What a range's step sees, and what it knows before it compares.

use cubecl::prelude::*;

use super::kernel::Blueprint;
use super::table::*;

/// What a range's step sees: slots, counted from the range's first.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Sight {
    pub(super) length: usize,
    pub(super) sinks: usize,
    /// First slot in sight behind the sinks.
    pub(super) start: usize,
    /// First local slot.
    pub(super) local: usize,
    /// What a token's index is ahead of its slot.
    pub(super) freed: usize,
    /// Tokens so far.
    pub(super) tokens: usize,
}

#[cube]
pub(super) fn sight_of(
    length: i32,
    newest: i32,
    sinks: usize,
    locals: usize,
    hidden: u32,
) -> Sight {
    let length = max(length, 0i32) as usize;
    let tokens = max(newest + 1i32, 0i32) as usize;
    let freed = tokens - min(tokens, length);
    let sinks = min(sinks, length);
    let first = first_in_sight(hidden, tokens);
    let start = min(max(first - min(first, freed), sinks), length);
    let local = max(length - min(locals, length), start);
    Sight { length, sinks, start, local, freed, tokens }
}

/// The first of `tokens` tokens that the last of them sees behind the sinks, counted from 0.
#[cube]
pub(super) fn first_in_sight(hidden: u32, tokens: usize) -> usize {
    let start = hidden.mul_hi(tokens as u32);
    (start - min(start, 1u32)) as usize
}

/// What a range's step knows before it compares.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Outset {
    /// Where its row in the table begins.
    pub(super) own: usize,
    pub(super) sight: Sight,
    /// Slots that are retrieved, before neighbours.
    pub(super) top: usize,
    pub(super) threshold: f32,
    /// The block of steps that it belongs to, and the sets that this has by now.
    pub(super) block: i32,
    pub(super) held: usize,
}

#[cube]
pub(super) fn outset_of(
    table: &[i32],
    pair: usize,
    length: i32,
    position: i32,
    block: usize,
    hidden: u32,
    #[comptime] blueprint: Blueprint,
) -> Outset {
    let sets = blueprint.sets.comptime();
    let own = pair * comptime!(row(blueprint.sets, blueprint.width));
    let sinks = table[own + SINKS] as usize;
    let locals = table[own + LOCALS] as usize;
    let sight = sight_of(length, position, sinks, locals, hidden);
    let top = table[own + TOP] as usize;
    let threshold = f32::reinterpret(table[own + THRESHOLD]);
    let block = max(position, 0i32) / i32::cast_from(block);
    let mut held = 0usize;
    if table[own + BLOCK] == block {
        held = min(table[own + SETS] as usize, sets);
    }
    Outset { own, sight, top, threshold, block, held }
}
