//! How quantised numbers lie in 32-bit words, and how a number becomes a code.
//!
//! A number `x` between a minimum `m` and a maximum is kept as `c = round((x − m) / s)` with the
//! step `s = (max − m) / (2^bits − 1)`, and stands for `m + s c`. `m` and `s` are rounded to the
//! upper 16 bits of an f32 (bf16) before codes are made, so that codes belong to the numbers that
//! are kept. They share a word: `s` in the upper half, `m` in the lower half.

/// Slots of a block: a channel's keys share a minimum and a step within a block.
pub(crate) const BLOCK: usize = 64;

/// The bits that a code may have.
pub(crate) const MOST_BITS: usize = 8;

/// Codes of a word.
pub(crate) const fn codes_of_word(bits: usize) -> usize {
    32 / bits
}

/// Words of a row of `head_dim` codes.
pub(crate) const fn words(head_dim: usize, bits: usize) -> usize {
    head_dim.div_ceil(codes_of_word(bits))
}

#[cfg(feature = "gpu")]
pub(crate) mod kernel {
    //! The arithmetic in CubeCL.

    use cubecl::prelude::*;

    /// The upper 16 bits of `x`, rounded to even.
    #[cube]
    pub(crate) fn upper_half(x: f32) -> u32 {
        let bits = u32::reinterpret(x);
        (bits + 0x7fffu32 + ((bits >> 16u32) & 1u32)) >> 16u32
    }

    /// The word of a minimum and a maximum, which are `f32::MAX` and `f32::MIN` where there is no
    /// number: it has a step and a minimum of 0 then. A block with a number that is NaN or infinite
    /// (`!finite`) gets a step of NaN, so that attention shows it.
    #[cube]
    pub(crate) fn packed(low: f32, high: f32, finite: bool, #[comptime] bits: usize) -> u32 {
        let most = comptime!(((1u32 << bits) - 1) as f32);
        let step = (high - low) / f32::new(most);
        let upper = select(finite, upper_half(step), 0x7fc0u32);
        let none = select(finite, 0u32, 0x7fc0_0000u32);
        select(low > high, none, (upper << 16u32) | upper_half(low))
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

    fn upper_half(x: f32) -> u32 {
        let bits = x.to_bits();
        bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16
    }

    /// The word of the minimum and the maximum of numbers, with a step of NaN where one of them is
    /// NaN or infinite. No numbers have a step and a minimum of 0.
    pub(crate) fn packed(numbers: impl Iterator<Item = f32>, bits: usize) -> u32 {
        let (mut low, mut high, mut finite) = (f32::MAX, f32::MIN, true);
        for x in numbers {
            (low, high, finite) = (low.min(x), high.max(x), finite && x.is_finite());
        }
        if low > high {
            return if finite { 0 } else { 0x7fc0 << 16 };
        }
        let step = (high - low) / ((1u32 << bits) - 1) as f32;
        let upper = if finite { upper_half(step) } else { 0x7fc0 };
        (upper << 16) | upper_half(low)
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
