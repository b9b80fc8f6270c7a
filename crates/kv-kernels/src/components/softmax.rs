//! Weights of logits, and merging of partial sums of them.

use cubecl::prelude::*;

use super::sentinels::WEIGHTLESS_LOGIT;

const WEIGHTLESS_BITS: u32 = WEIGHTLESS_LOGIT.to_bits();
const NEG_INFINITY_BITS: u32 = f32::NEG_INFINITY.to_bits();

/// `exp(logit - max)`, and 0 for a slot without weight.
///
/// Compared as bits, of which NaN is none in between: on floats, compilers that may assume that
/// there is no NaN turn it into a weight of 0.
#[cube]
#[allow(clippy::manual_range_contains, reason = "kernels know no `contains`")]
pub(crate) fn weight_of(logit: f32, max: f32) -> f32 {
    let bits = u32::reinterpret(logit);
    let mut p = (logit - max).exp();
    if bits >= WEIGHTLESS_BITS && bits <= NEG_INFINITY_BITS {
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
