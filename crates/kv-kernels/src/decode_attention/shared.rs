//! What the kernels have in common: which slot is the `i`-th that a query attends to, weights of
//! logits, merging of partial sums.

use cubecl::prelude::*;

use super::ViewKind;

/// Below every logit that carries weight; a finite stand-in for −∞, which WGSL cannot write down.
pub(crate) const LOWEST: f32 = -3.0e38;
/// The bits of -1e38: logits from there to −∞ have weight 0.
const WEIGHTLESS: u32 = 0xfe96_7699;
/// The bits of −∞.
const NEVER: u32 = 0xff80_0000;

/// How many of a range's slots are skipped behind the sinks.
#[cube]
pub(super) fn gap_of(
    view: &[i32],
    pair: usize,
    length: usize,
    sinks: usize,
    #[comptime] kind: ViewKind,
) -> usize {
    let mut gap = 0usize;
    if comptime!(kind == ViewKind::Window) {
        let kept = min(sinks, length);
        let first = view[pair];
        if first > 0i32 && first as usize > kept {
            gap = min(first as usize, length) - kept;
        }
    }
    gap
}

/// A range's first slot, or where its list starts.
#[cube]
pub(super) fn start_of(
    offsets: &[i32],
    pair: usize,
    width: usize,
    #[comptime] kind: ViewKind,
) -> usize {
    let mut start = offsets[pair] as usize;
    if comptime!(kind == ViewKind::List) {
        start = pair * width;
    }
    start
}

/// The `i`-th slot that a query attends to. Lists start at `start` in `view`; what is no slot of the
/// pool becomes `slots`.
#[cube]
pub(super) fn slot_at(
    view: &[i32],
    start: usize,
    i: usize,
    sinks: usize,
    gap: usize,
    slots: usize,
    #[comptime] kind: ViewKind,
) -> usize {
    let mut slot = start + i;
    if comptime!(kind == ViewKind::Window) {
        slot += select(i < sinks, 0usize, gap);
    }
    if comptime!(kind == ViewKind::List) {
        let listed = view[slot];
        slot = select(listed >= 0i32 && (listed as usize) < slots, listed as usize, slots);
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

/// The larger, where NaN is never the larger: it stays in the sums.
#[cube]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    select(b > a, b, a)
}
