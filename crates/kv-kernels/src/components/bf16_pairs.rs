//! Numbers in two bf16 numbers each. Matrix instructions multiply bf16 numbers exactly and sum them
//! in f32, so a factor that is the sum of two bf16 numbers keeps 16 bits of its fraction.

use cubecl::prelude::*;

/// The leading bits of a number, which bf16 has room for.
#[cube]
pub(crate) fn lead(x: f32) -> f32 {
    f32::reinterpret(u32::reinterpret(x) & 0xffff_0000u32)
}

/// A number rounded to the bits that a sum of two bf16 numbers has. Without the rounding, all
/// factors would be too small, and their errors would add up.
#[cube]
pub(crate) fn rounded(x: f32) -> f32 {
    let leading = lead(x);
    let rest = u32::reinterpret(x - leading) + 0x8000u32;
    leading + f32::reinterpret(rest & 0xffff_0000u32)
}

/// A pair of bf16 numbers, of the upper halves of two f32.
#[cube]
pub(crate) fn packed(low: f32, high: f32) -> u32 {
    (u32::reinterpret(low) >> 16u32) | (u32::reinterpret(high) & 0xffff_0000u32)
}
