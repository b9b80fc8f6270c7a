//! Counter-based random numbers on CubeCL devices, equal to those of the host.

use cubecl::prelude::*;

/// Draws a number by each unit.
#[cube(launch)]
pub(crate) fn uniforms_kernel(seeds: &[i32], draws: &[i32], output: &mut [f32], count: usize) {
    let at = ABSOLUTE_POS;
    if at >= count {
        terminate!();
    }
    let (low, high) = (u32::cast_from(seeds[2 * at]), u32::cast_from(seeds[2 * at + 1]));
    output[at] = uniform(low, high, u32::cast_from(draws[at]));
}

/// A number in `[0, 1)` of 24 bits, which depends on seed and draw alone.
#[cube]
pub(crate) fn uniform(seed_low: u32, seed_high: u32, draw: u32) -> f32 {
    let bits = mix(mix(mix(seed_low) ^ seed_high) ^ draw);
    f32::cast_from(bits >> 8) * comptime!(1.0f32 / 16_777_216.0)
}

#[cube]
pub(crate) fn mix(x: u32) -> u32 {
    let mut x = x + 0x9e37_79b9u32;
    x ^= x >> 16;
    x *= 0x7feb_352du32;
    x ^= x >> 15;
    x *= 0x846c_a68bu32;
    x ^ (x >> 16)
}
