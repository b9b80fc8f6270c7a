//! Softmax weights of logits, and helpers to merge partial sums of weights.

use cubecl::prelude::*;

use super::sentinels::WEIGHTLESS_LOGIT;

const WEIGHTLESS_BITS: u32 = WEIGHTLESS_LOGIT.to_bits();
const NEG_INFINITY_BITS: u32 = f32::NEG_INFINITY.to_bits();

/// `exp(logit − max)`, and 0 for a slot without weight.
///
/// The bounds are compared as bits, and no NaN lies between them. With floats, compilers that
/// assume there is no NaN would turn NaN into a weight of 0.
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

/// The divisor for a sum of weights: 1 where nothing is attended to.
#[cube]
pub(crate) fn divisor(sum: f32) -> f32 {
    select(u32::reinterpret(sum) == 0u32, 1.0f32, sum)
}

/// A factor for a weighted sum of values: 0 where the sum of weights is 0, whatever the numerators
/// add.
#[cube]
pub(crate) fn presence(sum: f32) -> f32 {
    select(u32::reinterpret(sum) == 0u32, 0.0f32, 1.0f32)
}

/// Whether a number is not NaN, told by its bits: WGSL compilers assume that `x == x`.
#[cube]
pub(crate) fn is_number(x: f32) -> bool {
    u32::reinterpret(x) & 0x7fff_ffffu32 <= 0x7f80_0000u32
}

/// `b` where it is greater than `a`, else `a`: a NaN `b` never becomes the maximum, and stays in
/// the sums.
#[cube]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    select(b > a, b, a)
}
