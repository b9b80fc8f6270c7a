//! What the kernels have in common: which slot is the `i`-th that a query attends to, weights of
//! logits, merging of partial sums.

use cubecl::prelude::*;

use super::ViewKind;
use crate::retrieve_slots::Chosen;
use crate::retrieve_slots::table::{FIRST, FREED, LOCAL, READ, SINKS};

/// Below every logit that carries weight; a finite stand-in for −∞, which WGSL cannot write down.
pub(crate) const LOWEST: f32 = -3.0e38;
/// The bits of -1e38: logits from there to −∞ have weight 0.
const WEIGHTLESS: u32 = 0xfe96_7699;
/// The bits of −∞.
const NEVER: u32 = 0xff80_0000;

/// Which of a range's slots a query attends to.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Seen {
    /// How many.
    pub(crate) count: usize,
    /// The range's first slot.
    pub(super) start: usize,
    /// How many are read from there on before those that `listed` and `gap` are for.
    sinks: usize,
    /// How many are listed behind the sinks, and where in the view.
    listed: usize,
    list: usize,
    /// What a listed token's index is ahead of its slot.
    freed: usize,
    /// How many slots are skipped before the rest.
    gap: usize,
}

#[cube]
pub(crate) fn seen_of(
    view: &[i32],
    offsets: &[i32],
    lengths: &[i32],
    pair: usize,
    width: usize,
    sinks: usize,
    #[comptime] kind: ViewKind,
) -> Seen {
    let length = max(lengths[pair], 0i32) as usize;
    let mut seen = Seen {
        count: length,
        start: offsets[pair] as usize,
        sinks: 0usize,
        listed: 0usize,
        list: 0usize,
        freed: 0usize,
        gap: 0usize,
    };
    if comptime!(kind == ViewKind::Window) {
        seen.sinks = sinks;
        let kept = min(sinks, length);
        let first = view[pair];
        if first > 0i32 && first as usize > kept {
            seen.gap = min(first as usize, length) - kept;
        }
        seen.count -= seen.gap;
    }
    if comptime!(kind == ViewKind::List) {
        seen.list = pair * width;
    }
    if comptime!(kind == ViewKind::Sets) {
        let own = pair * width;
        let chosen = Chosen {
            sinks: min(view[own + SINKS] as usize, length),
            first: view[own + FIRST] as usize,
            count: view[own + READ] as usize,
            local: view[own + LOCAL] as usize,
            freed: view[own + FREED] as usize,
        };
        let own = seen_chosen(&chosen, seen.start, length, own);
        seen.count = own.count;
        seen.sinks = own.sinks;
        seen.listed = own.listed;
        seen.list = own.list;
        seen.freed = own.freed;
        seen.gap = own.gap;
    }
    seen
}

/// What a step of the range at slot `start` reads, as chosen in the row at `own` of the table.
#[cube]
pub(crate) fn seen_chosen(chosen: &Chosen, start: usize, length: usize, own: usize) -> Seen {
    // What is listed is before the locals.
    let gap = chosen.local - (chosen.sinks + chosen.count);
    Seen {
        count: length - gap,
        start,
        sinks: chosen.sinks,
        listed: chosen.count,
        list: own + chosen.first,
        freed: chosen.freed,
        gap,
    }
}

/// The `i`-th slot that a query attends to; what is no slot of the pool becomes `slots`.
#[cube]
pub(super) fn slot_at(
    view: &[i32],
    seen: &Seen,
    i: usize,
    slots: usize,
    #[comptime] kind: ViewKind,
) -> usize {
    let mut slot = seen.start + i;
    if comptime!(kind == ViewKind::Window) {
        slot += select(i < seen.sinks, 0usize, seen.gap);
    }
    if comptime!(kind == ViewKind::List) {
        let listed = view[seen.list + i];
        slot = select(listed >= 0i32 && (listed as usize) < slots, listed as usize, slots);
    }
    if comptime!(kind == ViewKind::Sets) && i >= seen.sinks {
        if i < seen.sinks + seen.listed {
            slot = seen.start + view[seen.list + i - seen.sinks] as usize - seen.freed;
        } else {
            slot += seen.gap;
        }
    }
    slot
}

/// `exp(logit - max)`, and 0 for a slot without weight.
///
/// Compared as bits, of which NaN is none in between: on floats, compilers that may assume that
/// there is no NaN turn it into a weight of 0.
#[cube]
#[allow(clippy::manual_range_contains, reason = "kernels know no `contains`")]
pub(crate) fn weight_of(logit: f32, max: f32) -> f32 {
    let bits = u32::reinterpret(logit);
    let mut p = (logit - max).exp();
    if bits >= WEIGHTLESS && bits <= NEVER {
        p = 0.0f32;
    }
    p
}

/// A sum of weights to divide by: 1 where nothing was attended to.
#[cube]
pub(crate) fn divisor(sum: f32) -> f32 {
    select(u32::reinterpret(sum) == 0u32, 1.0f32, sum)
}

/// What a weighted sum is worth over a sum of weights: nothing where nothing was attended to,
/// whatever numerators add.
#[cube]
pub(crate) fn presence(sum: f32) -> f32 {
    select(u32::reinterpret(sum) == 0u32, 0.0f32, 1.0f32)
}

/// Whether a number is one, told by its bits: WGSL's compilers take it for granted that `x == x`.
#[cube]
pub(crate) fn is_number(x: f32) -> bool {
    u32::reinterpret(x) & 0x7fff_ffffu32 <= 0x7f80_0000u32
}

/// The larger, where NaN is never the larger: it stays in the sums.
#[cube]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    select(b > a, b, a)
}
