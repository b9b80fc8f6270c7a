//! The forms of a vague part in blocks.

use burn::tensor::{DType, Device};
use kv_kernels::{ArchivePool, QuantizedBits, QuantizedPool};
use serde::{Deserialize, Serialize};

use super::pool::VaguePool;

/// The form in which the vague part keeps tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "vague", rename_all = "kebab-case", deny_unknown_fields)]
pub enum VagueForm {
    /// A few bits of each number, on the device.
    Quantized {
        /// Bits of a number of a key, 1 to 8.
        key_bits: usize,
        /// Bits of a number of a value, 1 to 8.
        value_bits: usize,
    },
    /// Whole tokens in host memory, with a bit a channel on the device. A few tokens come back
    /// exactly at each step; the others stand as a mean for each block.
    Archive {
        /// Tokens of each head that come back at a step, at least 1.
        revived: usize,
    },
    /// A mean for each block, and nothing else.
    Summary {},
}

impl VagueForm {
    /// Quantised tokens by default. Two bits are too few for some models' keys
    /// (docs/results/quality.md).
    pub const QUANTIZED: Self = Self::Quantized { key_bits: 3, value_bits: 2 };
    /// Archived tokens by default.
    pub const ARCHIVE: Self = Self::Archive { revived: 64 };
    /// Blocks summed up by default.
    pub const SUMMARY: Self = Self::Summary {};

    /// The form of a name in `vague`, with its default options.
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "quantized" => Some(Self::QUANTIZED),
            "archive" => Some(Self::ARCHIVE),
            "summary" => Some(Self::SUMMARY),
            _ => None,
        }
    }

    /// Refuses options outside their ranges.
    pub(super) fn check(self) -> Result<(), String> {
        match self {
            Self::Quantized { key_bits, value_bits } => {
                let named = [("key_bits", key_bits), ("value_bits", value_bits)];
                match named.into_iter().find(|(_, bits)| !(1..=8).contains(bits)) {
                    Some((name, bits)) => Err(format!("`{name}` is {bits}, expected 1 to 8")),
                    None => Ok(()),
                }
            }
            Self::Archive { revived: 0 } => Err("`revived` is 0, expected at least 1".into()),
            Self::Archive { .. } | Self::Summary {} => Ok(()),
        }
    }

    /// Tokens of each head that come back exactly at a step.
    pub(super) fn revived(self) -> usize {
        match self {
            Self::Archive { revived } => revived,
            Self::Quantized { .. } | Self::Summary {} => 0,
        }
    }

    /// The bytes of a vague token on the device, as a share of the bytes of a 16-bit slot of
    /// `head_dim` numbers.
    pub fn slot_share(self, head_dim: usize) -> f64 {
        let bytes = match self {
            Self::Quantized { key_bits, value_bits } => {
                let bits = QuantizedBits { keys: key_bits, values: value_bits };
                QuantizedPool::slot_bytes(head_dim, bits)
            }
            Self::Archive { .. } => ArchivePool::slot_bytes(head_dim, true),
            Self::Summary {} => ArchivePool::slot_bytes(head_dim, false),
        };
        bytes / (4 * head_dim) as f64
    }

    /// A pool of `blocks` blocks, at least one, for tokens of this dtype.
    pub(super) fn pool(
        self,
        blocks: usize,
        head_dim: usize,
        dtype: DType,
        device: &Device,
    ) -> VaguePool {
        match self {
            Self::Quantized { key_bits, value_bits } => {
                let bits = QuantizedBits { keys: key_bits, values: value_bits };
                VaguePool::Quantized(QuantizedPool::new(blocks, head_dim, bits, device))
            }
            Self::Archive { .. } | Self::Summary {} => {
                let revived = self.revived();
                let pool = ArchivePool::new(blocks, head_dim, dtype, revived > 0, device);
                VaguePool::Archive { pool, revived }
            }
        }
    }
}
