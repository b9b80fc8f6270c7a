//! Random numbers from counters: a number depends on its seed and its place alone, so that every
//! backend draws the same, in whatever order.

#[cfg(feature = "gpu")]
pub(crate) mod kernel;

/// A number in `[0, 1)` of 24 bits: each (seed, draw) has its own.
pub(crate) fn uniform([low, high]: [u32; 2], draw: u32) -> f32 {
    let bits = mix(mix(mix(low) ^ high) ^ draw);
    (bits >> 8) as f32 / 16_777_216.0
}

/// Every bit of the result depends on every bit of `x` (the constants are Wellons' "lowbias32").
pub(crate) fn mix(x: u32) -> u32 {
    let mut x = x.wrapping_add(0x9e37_79b9);
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}
