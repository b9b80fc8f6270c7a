//! How quantised numbers lie in 32-bit words, and how a number becomes a code.
//!
//! A number `x` between a minimum `m` and a maximum is kept as `c = round((x − m) / s)` with the
//! step `s = (max − m) / (2^bits − 1)`, and stands for `m + s c`. `m` is rounded down and `s` is
//! rounded up to the upper 16 bits of an f32 (bf16) before codes are made: codes belong to the
//! numbers that are kept, and the maximum has a code. `m` and `s` share a word: `s` in the upper
//! half, `m` in the lower half.
//!
//! Each half of a word of codes holds `16 / bits` codes, the first in the lowest bits. So a shift
//! and a mask take one code from each half, a pair of 16-bit numbers for matrix instructions.
//!
//! A block has 64 slots. Neighbouring units read neighbouring words:
//!
//! | tensor | order | a word has |
//! |---|---|---|
//! | codes of keys | `[block, word, slot]` | channels of one slot |
//! | scales of keys | `[block, channel]` | |
//! | codes of values | `[block, word, channel]` | slots of one channel |
//! | scales of values | `[block, slot]` | |

/// Slots of a block: a channel's keys share a minimum and a step within a block.
pub(crate) const BLOCK: usize = 64;

/// The bits that a code may have.
pub(crate) const MOST_BITS: usize = 8;

/// Codes of half a word.
pub(crate) const fn codes_of_half(bits: usize) -> usize {
    16 / bits
}

/// Codes of a word.
pub(crate) const fn codes_of_word(bits: usize) -> usize {
    2 * codes_of_half(bits)
}

/// Words of `count` codes.
pub(crate) const fn words(count: usize, bits: usize) -> usize {
    count.div_ceil(codes_of_word(bits))
}

/// The lowest bit of the `i`-th code of a word.
pub(crate) const fn shift(i: usize, bits: usize) -> usize {
    i % codes_of_half(bits) * bits + i / codes_of_half(bits) * 16
}

/// Numbers of the tensors of a pool's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PoolSizes {
    pub(crate) key_codes: usize,
    pub(crate) key_scales: usize,
    pub(crate) value_codes: usize,
    pub(crate) value_scales: usize,
}

impl PoolSizes {
    /// The sizes of a pool of `blocks` blocks, with keys and values of the given bits.
    pub(crate) const fn new(blocks: usize, head_dim: usize, [keys, values]: [usize; 2]) -> Self {
        Self {
            key_codes: blocks * words(head_dim, keys) * BLOCK,
            key_scales: blocks * head_dim,
            value_codes: blocks * words(BLOCK, values) * head_dim,
            value_scales: blocks * BLOCK,
        }
    }
}

#[cfg(feature = "gpu")]
pub(crate) mod kernel {
    //! The arithmetic in CubeCL.

    use cubecl::prelude::*;

    use super::shift;
    use crate::components::softmax::is_number;

    /// The minimum and the maximum of numbers, and whether all are finite.
    #[derive(CubeType, Clone, Copy)]
    pub(crate) struct Range {
        low: f32,
        high: f32,
        finite: bool,
    }

    #[cube]
    impl Range {
        /// The range of no numbers.
        pub(crate) fn none() -> Range {
            Range { low: f32::new(f32::MAX), high: f32::new(f32::MIN), finite: true }
        }

        pub(crate) fn add(&mut self, x: f32) {
            self.low = select(x < self.low, x, self.low);
            self.high = select(x > self.high, x, self.high);
            self.finite = self.finite && is_finite(x);
        }

        /// The word of the step and the minimum. Numbers of which one is NaN or infinite get a step
        /// of NaN, so that attention shows it; no numbers get a step and a minimum of 0.
        pub(crate) fn scale(&self, #[comptime] bits: usize) -> u32 {
            let most = comptime!(((1u32 << bits) - 1) as f32);
            let low = rounded_down(self.low);
            let step = (self.high - f32::reinterpret(low << 16u32)) / f32::new(most);
            let mut word = (rounded_up(step) << 16u32) | low;
            if self.low > self.high {
                word = 0u32;
            }
            select(self.finite, word, 0x7fc0_0000u32)
        }
    }

    /// Whether a number is neither NaN nor infinite.
    #[cube]
    fn is_finite(x: f32) -> bool {
        is_number(x) && u32::reinterpret(x) & 0x7f80_0000u32 != 0x7f80_0000u32
    }

    /// The upper 16 bits of the next lower bf16 number.
    #[cube]
    fn rounded_down(x: f32) -> u32 {
        let bits = u32::reinterpret(x);
        (bits + select(bits >> 31u32 == 1u32, 0xffffu32, 0u32)) >> 16u32
    }

    /// The upper 16 bits of the next higher bf16 number; `x` is not negative.
    #[cube]
    fn rounded_up(x: f32) -> u32 {
        (u32::reinterpret(x) + 0xffffu32) >> 16u32
    }

    /// The step of a word.
    #[cube]
    pub(crate) fn step_of(word: u32) -> f32 {
        f32::reinterpret(word & 0xffff_0000u32)
    }

    /// The minimum of a word.
    #[cube]
    pub(crate) fn minimum_of(word: u32) -> f32 {
        f32::reinterpret(word << 16u32)
    }

    /// `1 + c / 2^bits` of a word's `i`-th code `c`: the code's bits become the upper bits of the
    /// fraction of an f32, which takes no conversion of integers.
    #[cube]
    pub(crate) fn fraction_of(word: u32, #[comptime] i: usize, #[comptime] bits: usize) -> f32 {
        let (at, to) = comptime!((shift(i, bits), 23 - bits));
        let mask = comptime!(((1u32 << bits) - 1) << to);
        let moved = if comptime!(to >= at) {
            word << comptime!(to.saturating_sub(at) as u32)
        } else {
            word >> comptime!(at.saturating_sub(to) as u32)
        };
        f32::reinterpret((moved & mask) | 0x3f80_0000u32)
    }

    /// [`fraction_of`] of the `i`-th code of each half, as a pair of bf16 numbers.
    #[cube]
    pub(crate) fn fractions_of(word: u32, #[comptime] i: usize, #[comptime] bits: usize) -> u32 {
        let (at, to) = comptime!((i * bits, 7 - bits));
        let mask = comptime!((((1u32 << bits) - 1) << to) * 0x0001_0001);
        let moved = if comptime!(to >= at) {
            word << comptime!(to.saturating_sub(at) as u32)
        } else {
            word >> comptime!(at.saturating_sub(to) as u32)
        };
        (moved & mask) | 0x3f80_3f80u32
    }

    /// The code of a number.
    #[cube]
    pub(crate) fn code_of(x: f32, word: u32, #[comptime] bits: usize) -> u32 {
        let most = comptime!(((1u32 << bits) - 1) as f32);
        let step = step_of(word);
        let inverse = select(step > 0.0f32, 1.0f32 / step, 0.0f32);
        let code = ((x - minimum_of(word)) * inverse + 0.5f32).floor();
        u32::cast_from(clamp(code, 0.0f32, f32::new(most)))
    }
}

#[cfg(feature = "flex")]
pub(crate) mod host {
    //! The arithmetic in plain Rust.

    /// The upper 16 bits of the next lower bf16 number.
    fn rounded_down(x: f32) -> u32 {
        let bits = x.to_bits();
        bits.wrapping_add(if x.is_sign_negative() { 0xffff } else { 0 }) >> 16
    }

    /// The upper 16 bits of the next higher bf16 number; `x` is not negative.
    fn rounded_up(x: f32) -> u32 {
        x.to_bits().wrapping_add(0xffff) >> 16
    }

    /// The word of the step and the minimum of numbers, with a step of NaN where one of them is NaN
    /// or infinite. No numbers have a step and a minimum of 0.
    pub(crate) fn scale(numbers: impl Iterator<Item = f32>, bits: usize) -> u32 {
        let (mut low, mut high, mut finite) = (f32::MAX, f32::MIN, true);
        for x in numbers {
            (low, high, finite) = (low.min(x), high.max(x), finite && x.is_finite());
        }
        if !finite {
            return 0x7fc0 << 16;
        }
        if low > high {
            return 0;
        }
        let minimum = rounded_down(low);
        let step = (high - f32::from_bits(minimum << 16)) / ((1u32 << bits) - 1) as f32;
        (rounded_up(step) << 16) | minimum
    }

    pub(crate) fn step_of(word: u32) -> f32 {
        f32::from_bits(word & 0xffff_0000)
    }

    pub(crate) fn minimum_of(word: u32) -> f32 {
        f32::from_bits(word << 16)
    }

    /// The code of a number.
    pub(crate) fn code_of(x: f32, word: u32, bits: usize) -> u32 {
        let step = step_of(word);
        let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
        let code = ((x - minimum_of(word)) * inverse + 0.5).floor();
        code.clamp(0.0, ((1u32 << bits) - 1) as f32) as u32
    }
}
