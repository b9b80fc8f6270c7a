//! The tensors of a pool of archived slots.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::host_words::{HostWordTensor, HostWords, apart, joined};
use super::layout::{BLOCK, row_words, signature_words};
use crate::KernelError;
use crate::backend::check::Check;

/// A pool of archived slots, in blocks of [`Self::BLOCK`]: their keys and values are in host memory
/// as they were, and the device has of each slot a bit a channel, which tells whether its key is
/// above the block's mean there, and of each block the means of keys and values and the keys'
/// spread. A pool that sums up keeps the means and spreads alone.
#[derive(Debug, Clone)]
pub struct ArchivePool {
    /// `[blocks, BLOCK, 2, W]`: each slot's key and value, `W` words each. A word has one f32, or
    /// two 16-bit numbers. None in a pool that sums up.
    pub rows: HostWords,
    /// `[blocks, ⌈D / 32⌉, BLOCK]`, flat, 32-bit: bit `i` of a word is channel `i`'s of its 32.
    /// None in a pool that sums up.
    pub signatures: Tensor<1, Int>,
    /// `[blocks, D]`, flat, 32-bit: the keys' spread in the upper half and their mean in the lower
    /// half, in bf16 each. A spread is the mean distance from the mean.
    pub key_statistics: Tensor<1, Int>,
    /// `[blocks, ⌈D / 2⌉]`, flat, 32-bit: means of values in two channels, in bf16, the first in
    /// the lower half.
    pub value_means: Tensor<1, Int>,
    /// Whether the pool keeps slots, or sums them up.
    pub keeps_slots: bool,
    /// `D`
    pub head_dim: usize,
    /// The dtype of keys and values.
    pub dtype: DType,
}

impl ArchivePool {
    /// Slots of a block.
    pub const BLOCK: usize = BLOCK;

    /// A pool of `blocks` blocks, at least one, whose contents are zeros.
    pub fn new(
        blocks: usize,
        head_dim: usize,
        dtype: DType,
        keeps_slots: bool,
        device: &Device,
    ) -> Self {
        let zeros = |length: usize| TensorData::zeros::<i32, _>([length]);
        let data = Self::lengths(blocks, head_dim, dtype, keeps_slots).map(zeros);
        Self::of(data, head_dim, dtype, keeps_slots, device)
    }

    /// The numbers of words in a pool of `blocks` blocks, at least one: rows, signatures, key
    /// statistics and value means.
    pub fn lengths(blocks: usize, head_dim: usize, dtype: DType, keeps_slots: bool) -> [usize; 4] {
        let blocks = blocks.max(1);
        let of_slots = |words: usize| if keeps_slots { blocks * BLOCK * words } else { 0 };
        [
            of_slots(2 * row_words(head_dim, dtype.size())),
            of_slots(signature_words(head_dim)),
            blocks * head_dim,
            blocks * head_dim.div_ceil(2),
        ]
    }

    /// A pool with these contents, in the order of [`Self::lengths`].
    pub fn of(
        data: [TensorData; 4],
        head_dim: usize,
        dtype: DType,
        keeps_slots: bool,
        device: &Device,
    ) -> Self {
        let [rows, signatures, key_statistics, value_means] = data;
        let tensor = |data: TensorData| Tensor::from_data(data, (device, DType::I32));
        Self {
            rows: HostWords::of(rows, device),
            signatures: tensor(signatures),
            key_statistics: tensor(key_statistics),
            value_means: tensor(value_means),
            keeps_slots,
            head_dim,
            dtype,
        }
    }

    /// The contents, in the order of [`Self::lengths`].
    ///
    /// # Errors
    /// A description, where the device fails.
    pub fn to_data(&self) -> Result<[TensorData; 4], String> {
        let read = |tensor: &Tensor<1, Int>| {
            tensor.clone().try_into_data().map_err(|error| error.to_string())
        };
        Ok([
            self.rows.to_data()?,
            read(&self.signatures)?,
            read(&self.key_statistics)?,
            read(&self.value_means)?,
        ])
    }

    /// The pool in a memory of its own, for the kernels of `device`.
    ///
    /// # Errors
    /// A description, where a device fails.
    pub fn copied(&self, device: &Device) -> Result<Self, String> {
        let copied = |own: &Tensor<1, Int>| match own.device() == *device {
            true => apart(own),
            false => own.clone().to_device(device),
        };
        Ok(Self {
            rows: self.rows.copied(device)?,
            signatures: copied(&self.signatures),
            key_statistics: copied(&self.key_statistics),
            value_means: copied(&self.value_means),
            ..*self
        })
    }

    /// The blocks of several pools, one after another.
    ///
    /// # Errors
    /// A description, where the device fails.
    ///
    /// # Panics
    /// Without any pools.
    pub fn concat(pools: &[&Self]) -> Result<Self, String> {
        let joined = |of: fn(&Self) -> &Tensor<1, Int>| joined(pools.iter().map(|pool| of(pool)));
        let rows: Vec<&HostWords> = pools.iter().map(|pool| &pool.rows).collect();
        Ok(Self {
            rows: HostWords::concat(&rows)?,
            signatures: joined(|pool| &pool.signatures),
            key_statistics: joined(|pool| &pool.key_statistics),
            value_means: joined(|pool| &pool.value_means),
            ..*pools[0]
        })
    }

    /// Bytes of a device's memory for a slot of `head_dim` numbers, its share of the block's means
    /// and spreads included, where rows are in host memory.
    pub fn slot_bytes(head_dim: usize, keeps_slots: bool) -> f64 {
        let [_, signatures, statistics, means] =
            Self::lengths(1, head_dim, DType::F32, keeps_slots);
        4.0 * (signatures + statistics + means) as f64 / BLOCK as f64
    }

    /// The number of slots.
    pub fn slots(&self) -> usize {
        self.key_statistics.dims()[0] / self.head_dim.max(1) * BLOCK
    }

    /// Bytes of the device's memory, and of host memory.
    pub fn bytes(&self) -> [usize; 2] {
        let tensors = [&self.signatures, &self.key_statistics, &self.value_means];
        let device: usize = tensors.into_iter().map(|tensor| 4 * tensor.dims()[0]).sum();
        let rows = 4 * self.rows.length();
        if self.rows.are_in_host_memory() { [device, rows] } else { [device + rows, 0] }
    }

    /// Checks that the tensors belong together, for rows of `head_dim` numbers of `dtype`.
    pub(crate) fn check(
        &self,
        check: &Check,
        head_dim: usize,
        dtype: DType,
    ) -> Result<(), KernelError> {
        if self.dtype != dtype {
            return Err(KernelError::Dtype {
                op: check.op(),
                argument: "archived slots",
                expected: "the dtype of queries and keys",
                actual: self.dtype,
            });
        }
        if self.head_dim != head_dim {
            return Err(check.unsupported(
                "head dim",
                head_dim,
                "the head dim of the archived slots",
            ));
        }
        if !(head_dim * dtype.size()).is_multiple_of(4) {
            return Err(check.unsupported("head dim", head_dim, "even head dims, in 16 bits"));
        }
        let [words] = self.key_statistics.dims();
        if words == 0 || !words.is_multiple_of(head_dim) {
            return Err(check.unsupported("key_statistics", words, "a word a channel of a block"));
        }
        let lengths = Self::lengths(words / head_dim, head_dim, dtype, self.keeps_slots);
        if self.rows.length() != lengths[0] || u32::try_from(lengths[0]).is_err() {
            let expected = "the blocks' words, fewer than 4,294,967,296";
            return Err(check.unsupported("rows", self.rows.length(), expected));
        }
        let tensors = [
            ("signatures", &self.signatures),
            ("key_statistics", &self.key_statistics),
            ("value_means", &self.value_means),
        ];
        for ((name, tensor), &length) in tensors.into_iter().zip(&lengths[1..]) {
            check.shape(name, tensor, &[length])?;
            check.int(name, tensor)?;
        }
        Ok(())
    }

    /// The tensors as backends take them, to be read.
    pub(crate) fn to_tensors(&self) -> ArchiveTensors<burn::backend::Dispatch> {
        ArchiveTensors {
            rows: self.rows.to_read(),
            signatures: self.signatures.clone().into_dispatch(),
            key_statistics: self.key_statistics.clone().into_dispatch(),
            value_means: self.value_means.clone().into_dispatch(),
            keeps_slots: self.keeps_slots,
        }
    }
}

/// The tensors of an [`ArchivePool`].
#[derive(ExtensionType)]
pub(crate) struct ArchiveTensors<B: Backend> {
    #[extension_type]
    pub(crate) rows: HostWordTensor<B>,
    pub(crate) signatures: IntTensor<B>,
    pub(crate) key_statistics: IntTensor<B>,
    pub(crate) value_means: IntTensor<B>,
    pub(crate) keeps_slots: bool,
}

#[cfg(feature = "gpu")]
pub(crate) mod kernel {
    //! The pool as kernels take it.

    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::tensor::CubeTensor;
    use cubecl::prelude::*;

    use super::ArchiveTensors;
    use crate::archive::host_words::kernel::{FarWords, FarWordsLaunch};
    use crate::backend::client::unread_like;

    /// The buffers of a pool of archived slots.
    #[derive(CubeType, CubeLaunch)]
    pub(crate) struct ArchivedSlots {
        pub(crate) rows: FarWords,
        pub(crate) signatures: Box<[u32]>,
        pub(crate) key_statistics: Box<[u32]>,
        pub(crate) value_means: Box<[u32]>,
    }

    impl ArchiveTensors<CubeBackend> {
        /// The tensors as a kernel's argument.
        pub(crate) fn launched(&self) -> ArchivedSlotsLaunch {
            let buffer = |tensor: &CubeTensor| into_contiguous(tensor.clone()).into_buffer_arg();
            // A pool that sums up has no rows and no signatures, and empty buffers cannot be bound.
            let of_slots = |tensor: &CubeTensor| match self.keeps_slots {
                true => buffer(tensor),
                false => unread_like(&self.key_statistics).into_buffer_arg(),
            };
            let address = self.rows.address;
            ArchivedSlotsLaunch::new(
                FarWordsLaunch::new(
                    of_slots(&self.rows.tensor),
                    address as u32,
                    (address >> 32) as u32,
                    address != 0,
                ),
                of_slots(&self.signatures),
                buffer(&self.key_statistics),
                buffer(&self.value_means),
            )
        }
    }
}
