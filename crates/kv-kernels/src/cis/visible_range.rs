//! Which slots a range's step sees, and what it loads of its row of the table.

use cubecl::prelude::*;

use super::blueprint::Blueprint;
use super::kernel_args::StepRanges;
use super::table::*;

/// The slots that a step of a range sees, counted from the range's first: the first `sinks`, and
/// those from `start` on.
#[derive(CubeType, Clone, Copy)]
pub(super) struct VisibleRange {
    pub(super) length: usize,
    pub(super) sinks: usize,
    /// First visible slot behind the sinks.
    pub(super) start: usize,
    /// First local slot.
    pub(super) local: usize,
    /// What a token's index is ahead of its slot.
    pub(super) freed: usize,
}

/// The slots that the token at position `newest` sees of a range of `length` slots, where the share
/// `hidden_share` of the tokens before it is hidden, but for sinks.
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
    VisibleRange { length, sinks, start, local, freed }
}

/// The first of `tokens` tokens that the last of them sees behind the sinks, counted from 0.
#[cube]
pub(super) fn window_start(hidden_share: u32, tokens: usize) -> usize {
    let start = hidden_share.mul_hi(tokens as u32);
    (start - min(start, 1u32)) as usize
}

/// What a range's step knows before its vectors are compared.
#[derive(CubeType, Clone, Copy)]
pub(super) struct StepContext {
    /// Its range.
    pub(super) kv_head: usize,
    /// Where its row in the table begins.
    pub(super) own: usize,
    pub(super) visible: VisibleRange,
    /// Slots that are retrieved, before neighbours.
    pub(super) top: usize,
    pub(super) threshold: f32,
    /// The block of steps that it belongs to, and the sets that this has by now.
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
    let visible = visible_range(length, position, sinks, locals, ranges.hidden_share);
    let top = ranges.table[own + TOP] as usize;
    let threshold = f32::reinterpret(ranges.table[own + THRESHOLD]);
    let block = max(position, 0i32) / i32::cast_from(ranges.block);
    let mut held = 0usize;
    if ranges.table[own + BLOCK] == block {
        held = min(ranges.table[own + SETS] as usize, sets);
    }
    StepContext { kv_head, own, visible, top, threshold, block, held }
}
