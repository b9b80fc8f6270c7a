//! Bitmasks over a range's slots, one bit a slot. A selection is kept as a bitmask, as the union
//! with all neighbours is then a few shifts, and the tokens come out in ascending order.

use cubecl::prelude::*;

use super::blueprint::Blueprint;
use crate::components::barrier::sync_memory;

/// Slots of a word of a bitmask, one bit each.
pub(super) const WORD: usize = 32;
/// Bitmasks of a range, one array of words after another: the slots of the `k_top` highest scores,
/// the slots of the `k_dilate` highest scores, and the set with all neighbours.
pub(super) const BITMASKS: usize = 3;
/// Scores that a unit of a GPU reads before it waits for the first; a divisor of [`WORD`].
pub(super) const CHUNK: usize = 8;

/// The first and the end of the words that a unit works on, out of those that hold the first
/// `slots` slots.
#[cube]
pub(super) fn own_words(slots: usize, #[comptime] units: usize) -> (usize, usize) {
    let words = slots.div_ceil(WORD);
    let each = words.div_ceil(units);
    let first = min(UNIT_POS as usize * each, words);
    (first, min(first + each, words))
}

/// A mask of the word's slots from `start` to before `end`.
#[cube]
pub(super) fn within(word: usize, start: usize, end: usize) -> u32 {
    let first = word * WORD;
    let low = u32::cast_from(min(max(start, first) - first, WORD));
    let high = u32::cast_from(min(max(end, first) - first, WORD));
    // A shift by 32 bits would shift by none.
    let below = select(high == 32, !0u32, (1u32 << (high & 31u32)) - 1u32);
    let before_start = select(low == 32, !0u32, (1u32 << (low & 31u32)) - 1u32);
    below & !before_start
}

/// The slots of a word whose sort keys are above a pivot, and the slots whose sort keys equal it:
/// for the pivot of the `k_top` highest scores, and for the pivot of the `k_dilate` highest scores
/// (`best`).
#[derive(CubeType, Clone, Copy)]
pub(super) struct Compared {
    pub(super) above: u32,
    pub(super) equal: u32,
    pub(super) above_best: u32,
    pub(super) equal_best: u32,
}

/// Compares the sort keys of a word's slots from `start` to before `local` with both pivots.
#[cube]
pub(super) fn compared(
    keys: &[u32],
    base: usize,
    word: usize,
    start: usize,
    local: usize,
    pivot_top: u32,
    pivot_dilate: u32,
    #[comptime] chunk: usize,
) -> Compared {
    let mut of = Compared { above: 0u32, equal: 0u32, above_best: 0u32, equal_best: 0u32 };
    for round in 0..comptime!(WORD / chunk) {
        let mut some = Array::<u32>::new(chunk);
        // Neighbouring units begin in neighbouring banks.
        let from = UNIT_POS as usize + round * chunk;
        #[unroll]
        for c in 0..chunk {
            let slot = word * WORD + (from + c) % WORD;
            some[c] = keys[base + max(min(slot, local - 1), start)];
        }
        #[unroll]
        for c in 0..chunk {
            let mark = 1u32 << u32::cast_from((from + c) % WORD);
            of.above |= select(some[c] > pivot_top, mark, 0u32);
            of.equal |= select(some[c] == pivot_top, mark, 0u32);
            of.above_best |= select(some[c] > pivot_dilate, mark, 0u32);
            of.equal_best |= select(some[c] == pivot_dilate, mark, 0u32);
        }
    }
    let seen = within(word, start, local);
    of.above &= seen;
    of.equal &= seen;
    of.above_best &= seen;
    of.equal_best &= seen;
    of
}

/// The lowest `count` set bits of a word.
#[cube]
pub(super) fn lowest_bits(bits: u32, count: u32) -> u32 {
    let mut left = bits;
    if bits.count_ones() > count {
        let mut i = 0u32;
        while i < count {
            left &= left - 1u32;
            i += 1;
        }
        left ^= bits;
    }
    left
}

/// Where a range's bitmasks begin, and the words of each.
#[derive(CubeType, Clone, Copy)]
pub(super) struct BitmaskPlace {
    pub(super) marked: usize,
    pub(super) words: usize,
}

/// The slots of a word that are `distance` before or after a slot whose bit is set. The bitmask
/// with these bits has `words` words, from `marked` on.
#[cube]
pub(super) fn shifted(
    bitmasks: &[u32],
    marked: usize,
    words: usize,
    word: usize,
    distance: usize,
) -> u32 {
    let (far, near) = (distance / WORD, u32::cast_from(distance % WORD));
    let back = u32::cast_from(WORD) - near;
    let mut bits = 0u32;
    if word >= far && word - far < words {
        bits |= bitmasks[marked + word - far] << near;
    }
    if near > 0 && word > far && word - far - 1 < words {
        bits |= bitmasks[marked + word - far - 1] >> back;
    }
    if word + far < words {
        bits |= bitmasks[marked + word + far] >> near;
    }
    if near > 0 && word + far + 1 < words {
        bits |= bitmasks[marked + word + far + 1] << back;
    }
    bits
}

/// A barrier for sort keys and bitmasks: [`sync_memory`] where they are in global memory, and a
/// plain barrier where they are in shared memory.
#[cube]
pub(crate) fn sync_scratch(#[comptime] blueprint: Blueprint) {
    if comptime!(blueprint.staged > 0) {
        sync_cube();
    } else {
        sync_memory(blueprint.fenced);
    }
}
