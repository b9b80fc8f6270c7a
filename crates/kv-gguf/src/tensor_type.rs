//! The forms in which a file stores numbers.

use std::fmt;

use strum::{Display, FromRepr, VariantArray};

/// The form in which a file stores the numbers of a tensor. The discriminant is GGUF's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Display, FromRepr, VariantArray)]
#[allow(non_camel_case_types)]
#[non_exhaustive]
#[repr(u32)]
pub enum TensorType {
    /// 32-bit floating point.
    F32 = 0,
    /// 16-bit floating point (IEEE 754).
    F16 = 1,
    /// 4 bits, blocks of 32 with a scale.
    Q4_0 = 2,
    /// 4 bits, blocks of 32 with a scale and a minimum.
    Q4_1 = 3,
    /// 5 bits, blocks of 32 with a scale.
    Q5_0 = 6,
    /// 5 bits, blocks of 32 with a scale and a minimum.
    Q5_1 = 7,
    /// 8 bits, blocks of 32 with a scale.
    Q8_0 = 8,
    /// 4 bits, blocks of 256 with 8 scales and minima of 6 bits.
    Q4_K = 12,
    /// 5 bits, blocks of 256 with 8 scales and minima of 6 bits.
    Q5_K = 13,
    /// 6 bits, blocks of 256 with 16 scales of 8 bits.
    Q6_K = 14,
    /// 16-bit floating point with the exponent of 32-bit floating point.
    BF16 = 30,
}

impl TensorType {
    /// The numbers of a block.
    pub(crate) const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// The bytes of a block.
    pub(crate) const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 2 + 16,
            Self::Q4_1 => 4 + 16,
            Self::Q5_0 => 2 + 4 + 16,
            Self::Q5_1 => 4 + 4 + 16,
            Self::Q8_0 => 2 + 32,
            Self::Q4_K => 4 + 12 + 128,
            Self::Q5_K => 4 + 12 + 32 + 128,
            Self::Q6_K => 128 + 64 + 16 + 2,
        }
    }

    /// The supported types, for messages.
    pub(crate) fn supported() -> impl fmt::Display {
        let name = |kind: &Self| format!("{kind} ({})", *kind as u32);
        Self::VARIANTS.iter().map(name).collect::<Vec<_>>().join(", ")
    }
}
