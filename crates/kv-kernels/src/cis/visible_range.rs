//! The slots that a range's step sees, and the fields that it loads from the range's row of the
//! table.

use cubecl::prelude::*;

use super::blueprint::Blueprint;
use super::kernel_args::StepRanges;
use super::table::*;

/// The slots that a step of a range sees, counted from the range's first slot: the first `sinks`
/// slots, and all slots from `start` on.
#[derive(CubeType, Clone, Copy)]
pub(super) struct VisibleRange {
    pub(super) length: usize,
    pub(super) sinks: usize,
    /// The first visible slot after the sinks.
    pub(super) start: usize,
    /// The first local slot.
    pub(super) local: usize,
    /// Slots before the first local one that may have been locals earlier in the step's block.
    pub(super) tail: usize,
    /// By how much a token's index exceeds its slot.
    pub(super) freed: usize,
}

/// The slots that the token at position `newest` sees in a range of `length` slots. Of the tokens
/// so far, the first `hidden_share` is hidden, except sinks.
#[cube]
pub(super) fn visible_range(
    length: i32,
    newest: i32,
    sinks: usize,
    locals: usize,
    hidden_share: u32,
) -> VisibleRange {
    let length = max(length, 0i32) as usize;
    let tokens = max(newest + 1i32, 0i32) as usize;
    let freed = tokens - min(tokens, length);
    let sinks = min(sinks, length);
    let first = window_start(hidden_share, tokens);
    let start = min(max(first - min(first, freed), sinks), length);
    let local = max(length - min(locals, length), start);
    VisibleRange { length, sinks, start, local, tail: 0usize, freed }
}

/// The index of the first token after the sinks that the last of `tokens` tokens sees.
#[cube]
pub(super) fn window_start(hidden_share: u32, tokens: usize) -> usize {
    let start = hidden_share.mul_hi(tokens as u32);
    (start - min(start, 1u32)) as usize
}

/// The numbers of a range's step that are known before its vectors are compared.
#[derive(CubeType, Clone, Copy)]
pub(super) struct StepContext {
    /// The range.
    pub(super) kv_head: usize,
    /// Where the range's row begins in the table.
    pub(super) own: usize,
    pub(super) visible: VisibleRange,
    /// Tokens that a retrieval takes, without neighbours.
    pub(super) top: usize,
    pub(super) threshold: f32,
    /// The step's block, and the entries that the block has so far.
    pub(super) block: i32,
    pub(super) held: usize,
}

/// Loads the context of a step at `position` of a range of `length` slots from the range's row of
/// the table.
#[cube]
pub(super) fn load_step_context(
    ranges: &StepRanges,
    kv_head: usize,
    length: i32,
    position: i32,
    #[comptime] blueprint: Blueprint,
) -> StepContext {
    let sets = blueprint.sets.comptime();
    let own = kv_head * comptime!(row(blueprint.sets, blueprint.width));
    let sinks = ranges.table[own + SINKS] as usize;
    let locals = ranges.table[own + LOCALS] as usize;
    let mut visible = visible_range(length, position, sinks, locals, ranges.hidden_share);
    if comptime!(blueprint.tail) {
        // No further, whatever a loaded table says: the attention has room for no more slots.
        visible.tail = min(ranges.block - 1, visible.local - visible.start);
    }
    let top = ranges.table[own + TOP] as usize;
    let threshold = f32::reinterpret(ranges.table[own + THRESHOLD]);
    let block = max(position, 0i32) / i32::cast_from(ranges.block);
    let mut held = 0usize;
    if ranges.table[own + BLOCK] == block {
        held = min(ranges.table[own + SETS] as usize, sets);
    }
    StepContext { kv_head, own, visible, top, threshold, block, held }
}
