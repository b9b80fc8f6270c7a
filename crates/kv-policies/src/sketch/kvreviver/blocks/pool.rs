//! The pool of a layer's vague tokens, in one of the forms.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_core::{Error, Result, SavedState};
use kv_kernels::{
    ArchivePool, ArchivedAttentionOptions, AttendedSlots, QuantizedAttentionOptions, QuantizedBits,
    QuantizedPool, SlotRanges, archive_slots, archived_attention, quantize_slots,
    quantized_attention,
};

use super::form::VagueForm;

/// The pool of a layer's vague tokens.
#[derive(Debug, Clone)]
pub enum VaguePool {
    /// Quantised tokens.
    Quantized(QuantizedPool),
    /// Archived tokens, or means of their blocks alone.
    Archive {
        /// The tokens.
        pool: ArchivePool,
        /// Tokens of each head that come back at a step.
        revived: usize,
    },
}

/// Slots of a block, in both forms.
pub(super) const BLOCK: usize = QuantizedPool::BLOCK;
const _: () = assert!(BLOCK == ArchivePool::BLOCK);

/// The names of the tensors in files.
const QUANTIZED: [&str; 4] = ["key_codes", "key_scales", "value_codes", "value_scales"];
const ARCHIVED: [&str; 4] = ["rows", "signatures", "key_statistics", "value_means"];

impl VaguePool {
    /// The form of the tokens.
    pub fn form(&self) -> VagueForm {
        match self {
            Self::Quantized(pool) => {
                VagueForm::Quantized { key_bits: pool.bits.keys, value_bits: pool.bits.values }
            }
            Self::Archive { revived: 0, .. } => VagueForm::Summary {},
            Self::Archive { revived, .. } => VagueForm::Archive { revived: *revived },
        }
    }

    /// The device whose kernels read the tokens.
    pub(super) fn device(&self) -> Device {
        match self {
            Self::Quantized(pool) => pool.value_scales.device(),
            Self::Archive { pool, .. } => pool.signatures.device(),
        }
    }

    /// Bytes of the device's memory, and of host memory.
    pub fn bytes(&self) -> [usize; 2] {
        match self {
            Self::Quantized(pool) => [pool.bytes(), 0],
            Self::Archive { pool, .. } => pool.bytes(),
        }
    }

    /// Writes lists of slots, whole blocks of them, into blocks from `to` on, as
    /// [`quantize_slots`] and [`archive_slots`] do.
    pub(super) fn write(
        &mut self,
        keys: Tensor<2>,
        values: Tensor<2>,
        from: Tensor<2, Int>,
        to: Tensor<1, Int>,
    ) -> Result<()> {
        match self {
            Self::Quantized(pool) => quantize_slots(pool, keys, values, from, to)?,
            Self::Archive { pool, .. } => {
                let [keys, values] = [keys, values].map(|rows| rows.cast(pool.dtype));
                archive_slots(pool, keys, values, from, to)?;
            }
        }
        Ok(())
    }

    /// Continues the attention over exact slots over ranges of up to `longest` vague ones.
    pub(super) fn attend(
        &self,
        query: Tensor<3>,
        ranges: &SlotRanges,
        before: AttendedSlots,
        longest: usize,
    ) -> Result<AttendedSlots> {
        Ok(match self {
            Self::Quantized(pool) => {
                let options = QuantizedAttentionOptions::new(longest);
                quantized_attention(query, pool, ranges, before, options)?
            }
            Self::Archive { pool, revived } => {
                let options = ArchivedAttentionOptions { scale: None, longest, revived: *revived };
                archived_attention(query, pool, ranges, before, options)?
            }
        })
    }

    /// Whether [`Self::copy_blocks`] can copy the blocks of another pool. Rows of an archive are in
    /// host memory, which the device's kernels write block by block alone.
    pub(super) fn accepts(&self, from: &Self) -> bool {
        match (self, from) {
            (Self::Quantized(own), Self::Quantized(from)) => own.bits == from.bits,
            _ => false,
        }
    }

    /// Copies the blocks of a pool that [`Self::accepts`] has accepted, as
    /// [`QuantizedPool::copy_blocks`] does.
    pub(super) fn copy_blocks(&mut self, to: &Tensor<1, Int>, from: &Self) -> Result<()> {
        match (self, from) {
            (Self::Quantized(own), Self::Quantized(from)) => Ok(own.copy_blocks(to, from)?),
            _ => Err(immovable()),
        }
    }

    /// The blocks of a pool that [`Self::accepts`] has accepted, in a new pool of `blocks` blocks:
    /// its block `n` in block `to[n]`.
    pub(super) fn moved(
        &self,
        to: &Tensor<1, Int>,
        blocks: usize,
        head_dim: usize,
    ) -> Result<Self> {
        let Self::Quantized(own) = self else { return Err(immovable()) };
        let mut pool = QuantizedPool::new(blocks, head_dim, own.bits, &self.device());
        pool.copy_blocks(to, own)?;
        Ok(Self::Quantized(pool))
    }

    /// The pool in a memory of its own, for the kernels of `device`.
    pub(super) fn copied(&self, device: &Device) -> std::result::Result<Self, String> {
        Ok(match self {
            Self::Quantized(pool) => {
                let here = self.device() == *device;
                let copied = |own: &Tensor<1, Int>| match here {
                    // A kernel that wrote through a shared tensor would write into both.
                    true => own.clone().add_scalar(0),
                    false => own.clone().to_device(device),
                };
                Self::Quantized(QuantizedPool::of(pool.tensors(), pool.bits, copied))
            }
            Self::Archive { pool, revived } => {
                Self::Archive { pool: pool.copied(device)?, revived: *revived }
            }
        })
    }

    /// The blocks of several pools of one form, one after another.
    pub(super) fn concat(pools: &[&Self]) -> std::result::Result<Self, String> {
        match pools[0] {
            Self::Quantized(first) => {
                let own = |pool: &&Self| match pool {
                    Self::Quantized(pool) => Ok(pool.clone()),
                    Self::Archive { .. } => Err(mixed()),
                };
                let parts = pools.iter().map(own).collect::<std::result::Result<Vec<_>, _>>()?;
                let joined = |i: usize| {
                    Tensor::cat(parts.iter().map(|pool| pool.tensors()[i].clone()).collect(), 0)
                };
                Ok(Self::Quantized(QuantizedPool::of([0, 1, 2, 3], first.bits, joined)))
            }
            Self::Archive { revived, .. } => {
                let own = |pool: &&Self| match pool {
                    Self::Archive { pool, .. } => Ok(pool.clone()),
                    Self::Quantized(_) => Err(mixed()),
                };
                let parts = pools.iter().map(own).collect::<std::result::Result<Vec<_>, _>>()?;
                let pool = ArchivePool::concat(&parts.iter().collect::<Vec<_>>())?;
                Ok(Self::Archive { pool, revived: *revived })
            }
        }
    }

    /// The tensors by their names in files.
    pub(super) fn to_data(&self) -> std::result::Result<BTreeMap<String, TensorData>, String> {
        let (names, data) = match self {
            Self::Quantized(pool) => {
                let read = |tensor: &Tensor<1, Int>| {
                    tensor.clone().try_into_data().map_err(|error| error.to_string())
                };
                let [a, b, c, d] = pool.tensors();
                (QUANTIZED, [read(a)?, read(b)?, read(c)?, read(d)?])
            }
            Self::Archive { pool, .. } => (ARCHIVED, pool.to_data()?),
        };
        Ok(names.map(Into::into).into_iter().zip(data).collect())
    }

    /// A pool from a file, of `blocks` blocks.
    pub(super) fn load(
        saved: &mut SavedState,
        form: VagueForm,
        blocks: usize,
        head_dim: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        match form {
            VagueForm::Quantized { key_bits, value_bits } => {
                let bits = QuantizedBits { keys: key_bits, values: value_bits };
                let lengths = QuantizedPool::lengths(blocks, head_dim, bits);
                let tensor = |data| Tensor::from_data(data, (device, DType::I32));
                let data = taken(saved, QUANTIZED, lengths)?;
                Ok(Self::Quantized(QuantizedPool::of(data, bits, tensor)))
            }
            VagueForm::Archive { .. } | VagueForm::Summary {} => {
                let revived = form.revived();
                let keeps = revived > 0;
                let lengths = ArchivePool::lengths(blocks, head_dim, dtype, keeps);
                let data = taken(saved, ARCHIVED, lengths)?;
                let pool = ArchivePool::of(data, head_dim, dtype, keeps, device);
                Ok(Self::Archive { pool, revived })
            }
        }
    }
}

/// The tensors of these names and lengths.
fn taken(saved: &mut SavedState, names: [&str; 4], lengths: [usize; 4]) -> Result<[TensorData; 4]> {
    let mut take = |i: usize| saved.take(names[i], DType::I32, &[lengths[i]]);
    Ok([take(0)?, take(1)?, take(2)?, take(3)?])
}

fn immovable() -> Error {
    let reason = "an archive's blocks cannot be copied".into();
    Error::InvalidPlan { what: "vague tokens", reason }
}

fn mixed() -> String {
    "vague tokens of different forms".into()
}
