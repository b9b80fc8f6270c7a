//! Sort keys: integers that order as f32 numbers do, and what tells equal numbers of a row apart.

use cubecl::prelude::*;

/// Bits of the largest row's indices.
pub(crate) const INDEX_BITS: u32 = 20;

/// Whether the pair of a sort key and an index key is not below another pair.
#[cube]
pub(crate) fn not_below(high: u32, low: u32, other_high: u32, other_low: u32) -> bool {
    high > other_high || (high == other_high && low >= other_low)
}

/// The sort key of a number: its bits, in the order of numbers. Both zeros have one key, and NaN
/// has the lowest.
#[cube]
pub(crate) fn sort_key(number: f32) -> u32 {
    // Zeros are equal, whatever their sign.
    let bits = select(number == 0.0, 0u32, u32::reinterpret(number));
    let ordered = select(bits >> 31 == 1, !bits, bits | 0x8000_0000u32);
    select(bits & 0x7fff_ffffu32 > 0x7f80_0000u32, 0u32, ordered)
}

/// The number that has this [`sort_key`].
#[cube]
pub(crate) fn number_of_key(high: u32) -> f32 {
    f32::reinterpret(select(high >> 31 == 1, high & 0x7fff_ffffu32, !high))
}

/// The key of an index among equal numbers: the lower the index, the higher the key.
#[cube]
pub(crate) fn index_key(index: usize) -> u32 {
    comptime!((1u32 << INDEX_BITS) - 1) - u32::cast_from(index)
}

/// The sort key of a number that is not NaN; −0 is below 0. As [`sort_key`], in three instructions,
/// for reductions for whose end a whole cube waits.
#[cube]
pub(crate) fn sort_key_of_number(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let sign = bits >> 31;
    // All bits of negative numbers change, the sign of others.
    bits ^ ((0u32 - sign) | 0x8000_0000u32)
}
