//! Sort keys: integers that have the order of f32 numbers; and index keys, which order equal
//! numbers.

use cubecl::prelude::*;

/// Bits of the largest row's indices.
pub(crate) const INDEX_BITS: u32 = 20;

/// Whether a pair of a sort key and an index key is at least another pair.
#[cube]
pub(crate) fn not_below(high: u32, low: u32, other_high: u32, other_low: u32) -> bool {
    high > other_high || (high == other_high && low >= other_low)
}

/// The sort key of a number: its bits, transformed to the order of numbers. Both zeros have one
/// key, and NaN has the lowest key.
#[cube]
pub(crate) fn sort_key(number: f32) -> u32 {
    // Zeros of both signs are equal.
    let bits = select(number == 0.0, 0u32, u32::reinterpret(number));
    let ordered = select(bits >> 31 == 1, !bits, bits | 0x8000_0000u32);
    select(bits & 0x7fff_ffffu32 > 0x7f80_0000u32, 0u32, ordered)
}

/// The number whose [`sort_key`] is `high`.
#[cube]
pub(crate) fn number_of_key(high: u32) -> f32 {
    f32::reinterpret(select(high >> 31 == 1, high & 0x7fff_ffffu32, !high))
}

/// The index key, which orders equal numbers: the lower the index, the higher the key.
#[cube]
pub(crate) fn index_key(index: usize) -> u32 {
    comptime!((1u32 << INDEX_BITS) - 1) - u32::cast_from(index)
}

/// The sort key of a number that is not NaN; −0 is below 0. It takes three instructions, fewer than
/// [`sort_key`], for reductions on which a whole cube waits.
#[cube]
pub(crate) fn sort_key_of_number(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let sign = bits >> 31;
    // Of a negative number all bits are flipped, of other numbers the sign alone.
    bits ^ ((0u32 - sign) | 0x8000_0000u32)
}
