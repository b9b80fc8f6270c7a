//! How archived slots lie in 32-bit words.
//!
//! | tensor | order |
//! |---|---|
//! | rows | `[block, slot, key or value, word]` |
//! | signatures | `[block, word, slot]` |
//! | key statistics | `[block, channel]` |
//! | value means | `[block, word]` |
//!
//! - A word of a row has one f32, or two 16-bit numbers, the first in the lower half.
//! - A word of a signature has a bit for each of 32 channels of a slot's key, the first in the
//!   lowest bit: whether the key is above the block's mean.
//! - Key statistics are the spread of the block's keys in a channel, in the upper half of the word,
//!   and their mean. The spread is the mean distance from the mean.
//! - A word of value means has the means of the block's values in two channels, the first in the
//!   lower half.
//!
//! Means and spreads are rounded to the upper 16 bits of an f32 (bf16).
//!
//! A block has 64 slots. Neighbouring units read neighbouring words.

/// Slots of a block.
pub(crate) const BLOCK: usize = 64;

/// Channels of a word of a signature.
pub(crate) const SIGNS: usize = 32;

/// Words of a slot's signature.
pub(crate) const fn signature_words(head_dim: usize) -> usize {
    head_dim.div_ceil(SIGNS)
}

/// Words of a key or a value whose numbers have `size` bytes.
pub(crate) const fn row_words(head_dim: usize, size: usize) -> usize {
    head_dim * size / 4
}

#[cfg(feature = "gpu")]
pub(crate) mod kernel {
    //! The layout in CubeCL.

    use cubecl::prelude::*;

    use crate::components::softmax::is_number;

    /// A number rounded to bf16, in the upper half of a word. NaN stays NaN.
    #[cube]
    fn rounded(x: f32) -> u32 {
        let bits = u32::reinterpret(x);
        let sum = bits + 0x7fffu32 + ((bits >> 16u32) & 1u32);
        select(is_number(x), sum, bits | 0x0040_0000u32) & 0xffff_0000u32
    }

    /// Two numbers in a word, rounded to bf16, the first in the lower half.
    #[cube]
    pub(crate) fn pair(first: f32, second: f32) -> u32 {
        rounded(second) | (rounded(first) >> 16u32)
    }

    /// The number in the lower half of a word of [`pair`].
    #[cube]
    pub(crate) fn first_of(word: u32) -> f32 {
        f32::reinterpret(word << 16u32)
    }

    /// The number in the upper half of a word of [`pair`].
    #[cube]
    pub(crate) fn second_of(word: u32) -> f32 {
        f32::reinterpret(word & 0xffff_0000u32)
    }

    /// A number rounded to bf16.
    #[cube]
    pub(crate) fn nearest(x: f32) -> f32 {
        f32::reinterpret(rounded(x))
    }
}

#[cfg(feature = "flex")]
pub(crate) mod host {
    //! The layout in plain Rust.

    use half::{bf16, f16};

    /// A type of the keys' and values' numbers.
    pub(crate) trait Number: bytemuck::Pod {
        /// The number in f32.
        fn wide(self) -> f32;
        /// The word of one f32, or of two 16-bit numbers.
        fn word(numbers: &[Self]) -> u32 {
            let bytes: &[u8] = bytemuck::cast_slice(numbers);
            bytes.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte))
        }
    }

    impl Number for f32 {
        fn wide(self) -> f32 {
            self
        }
    }

    impl Number for f16 {
        fn wide(self) -> f32 {
            self.to_f32()
        }
    }

    impl Number for bf16 {
        fn wide(self) -> f32 {
            self.to_f32()
        }
    }

    /// Two numbers in a word, rounded to bf16, the first in the lower half.
    pub(crate) fn pair([first, second]: [f32; 2]) -> u32 {
        let bits = |x: f32| u32::from(bf16::from_f32(x).to_bits());
        bits(second) << 16 | bits(first)
    }

    /// The numbers of a word of [`pair`].
    pub(crate) fn both(word: i32) -> [f32; 2] {
        let word = word as u32;
        [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
    }

    /// A number rounded to bf16.
    pub(crate) fn nearest(x: f32) -> f32 {
        bf16::from_f32(x).to_f32()
    }
}
