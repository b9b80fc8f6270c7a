//! The tensors of a pool of quantised slots.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::{DType, Device, Int, Tensor};

use super::layout::{BLOCK, MOST_BITS, PoolSizes};
use crate::KernelError;
use crate::backend::check::Check;
use crate::slots::scatter_rows::scatter_ints;

/// Bits of each number of quantised slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QuantizedBits {
    /// Bits of a key's numbers, 1 to 8.
    pub keys: usize,
    /// Bits of a value's numbers, 1 to 8.
    pub values: usize,
}

/// A pool of quantised slots, in blocks of [`Self::BLOCK`]: codes of keys and values, a minimum and
/// a step for each channel of a block's keys, and a minimum and a step for each slot's value.
///
/// Keys are quantised by channel because a few channels have much larger numbers than the others in
/// all tokens, and values by token (KIVI, section 3). A number `x` is kept as the code
/// `round((x − minimum) / step)`. A word of 32 bits has `n = 2 ⌊16 / bits⌋` codes, half of them
/// in each half of the word, from its lowest bits on.
#[derive(Debug, Clone)]
pub struct QuantizedPool {
    /// `[blocks, ⌈D / n⌉, BLOCK]`, flat, 32-bit: a word has `n` channels of a slot's key.
    pub key_codes: Tensor<1, Int>,
    /// `[blocks, D]`, flat, 32-bit: the step in the upper half and the minimum in the lower half,
    /// the upper 16 bits of an f32 each.
    pub key_scales: Tensor<1, Int>,
    /// `[blocks, ⌈BLOCK / n⌉, D]`, flat, 32-bit: a word has a channel of the values of `n` slots.
    pub value_codes: Tensor<1, Int>,
    /// `[blocks, BLOCK]`, flat, 32-bit: step and minimum of a slot's value.
    pub value_scales: Tensor<1, Int>,
    /// Bits of a number.
    pub bits: QuantizedBits,
}

impl QuantizedPool {
    /// Slots of a block.
    pub const BLOCK: usize = BLOCK;

    /// A pool of `blocks` blocks, at least one, whose contents are zeros.
    pub fn new(blocks: usize, head_dim: usize, bits: QuantizedBits, device: &Device) -> Self {
        Self::of(Self::lengths(blocks, head_dim, bits), bits, |length| {
            Tensor::zeros([length], (device, DType::I32))
        })
    }

    /// The tensors' lengths in a pool of `blocks` blocks, at least one: codes and scales of keys,
    /// codes and scales of values.
    pub fn lengths(blocks: usize, head_dim: usize, bits: QuantizedBits) -> [usize; 4] {
        let sizes = PoolSizes::new(blocks.max(1), head_dim, [bits.keys, bits.values]);
        [sizes.key_codes, sizes.key_scales, sizes.value_codes, sizes.value_scales]
    }

    /// A pool whose tensors `make` gives, out of an item each, in the order of [`Self::lengths`].
    pub fn of<T>(
        items: [T; 4],
        bits: QuantizedBits,
        make: impl FnMut(T) -> Tensor<1, Int>,
    ) -> Self {
        let [key_codes, key_scales, value_codes, value_scales] = items.map(make);
        Self { key_codes, key_scales, value_codes, value_scales, bits }
    }

    /// The tensors, in the order of [`Self::lengths`].
    pub fn tensors(&self) -> [&Tensor<1, Int>; 4] {
        [&self.key_codes, &self.key_scales, &self.value_codes, &self.value_scales]
    }

    /// Copies the blocks of another pool over blocks of this one, in place: its block `n` over
    /// block `to[n]`, or nowhere where `to[n]` is negative.
    ///
    /// # Shapes
    /// `to` `[blocks]`, 32-bit, one for each block of `from`.
    ///
    /// # Errors
    /// [`KernelError`] for pools of other bits or head dims; the pool is unchanged. Blocks are on
    /// the device and are not checked beyond their sign.
    pub fn copy_blocks(&mut self, to: &Tensor<1, Int>, from: &Self) -> Result<(), KernelError> {
        let check = Check::new("copy_blocks", &self.value_scales);
        check.int("to", to)?;
        let ([blocks], [slots]) = (to.dims(), from.value_scales.dims());
        check.shape("to", to, &[slots / BLOCK])?;
        let head_dim =
            |pool: &Self| pool.key_scales.dims()[0] * BLOCK / pool.value_scales.dims()[0].max(1);
        if self.bits != from.bits || head_dim(self) != head_dim(from) {
            let actual = format!("{:?}, {}", from.bits, head_dim(from));
            let expected = "the bits and the head dim of the other pool";
            return Err(check.unsupported("from", actual, expected));
        }
        self.check(&check, head_dim(self))?;
        from.check(&check, head_dim(from))?;
        let device = to.device();
        let own = [
            &mut self.key_codes,
            &mut self.key_scales,
            &mut self.value_codes,
            &mut self.value_scales,
        ];
        for (own, from) in own.into_iter().zip(from.tensors()) {
            if i32::try_from(own.dims()[0]).is_err() {
                let expected = "fewer than 2,147,483,648 words";
                return Err(check.unsupported("pool", own.dims()[0], expected));
            }
            let words = from.dims()[0] / blocks;
            let columns = Tensor::<1, Int>::arange(0..words as i64, (&device, DType::I32));
            let columns = columns.unsqueeze_dim::<2>(0).expand([blocks, words]);
            // Negative blocks have negative words alone.
            let first = to.clone().mul_scalar(words as i32).unsqueeze_dim::<2>(1);
            let at = first.expand([blocks, words]) + columns;
            scatter_ints(own, at.flatten(0, 1), from.clone())?;
        }
        Ok(())
    }

    /// Bytes of a slot of `head_dim` numbers in a pool of these bits, its share of the block's
    /// minima and steps included.
    pub fn slot_bytes(head_dim: usize, bits: QuantizedBits) -> f64 {
        let numbers: usize = Self::lengths(1, head_dim, bits).into_iter().sum();
        4.0 * numbers as f64 / BLOCK as f64
    }

    /// Bytes of the pool.
    pub fn bytes(&self) -> usize {
        self.tensors().map(|tensor| 4 * tensor.dims()[0]).into_iter().sum()
    }

    /// Checks that the tensors belong together, for rows of `head_dim` numbers.
    pub(crate) fn check(&self, check: &Check, head_dim: usize) -> Result<(), KernelError> {
        let QuantizedBits { keys, values } = self.bits;
        for bits in [keys, values] {
            if !(1..=MOST_BITS).contains(&bits) {
                return Err(check.unsupported("bits", bits, "1 to 8"));
            }
        }
        let [slots] = self.value_scales.dims();
        if slots == 0 || !slots.is_multiple_of(BLOCK) {
            return Err(check.unsupported("quantized slots", slots, "whole blocks of 64"));
        }
        let names = ["key_codes", "key_scales", "value_codes", "value_scales"];
        let lengths = Self::lengths(slots / BLOCK, head_dim, self.bits);
        for ((name, tensor), length) in names.into_iter().zip(self.tensors()).zip(lengths) {
            check.shape(name, tensor, &[length])?;
            check.counted(name, tensor)?;
            check.int(name, tensor)?;
        }
        Ok(())
    }

    /// The tensors as backends take them.
    pub(crate) fn into_tensors(self) -> QuantizedTensors<burn::backend::Dispatch> {
        QuantizedTensors {
            key_codes: self.key_codes.into_dispatch(),
            key_scales: self.key_scales.into_dispatch(),
            value_codes: self.value_codes.into_dispatch(),
            value_scales: self.value_scales.into_dispatch(),
            bits: self.bits,
        }
    }
}

/// The tensors of a [`QuantizedPool`].
#[derive(ExtensionType)]
pub(crate) struct QuantizedTensors<B: Backend> {
    pub(crate) key_codes: IntTensor<B>,
    pub(crate) key_scales: IntTensor<B>,
    pub(crate) value_codes: IntTensor<B>,
    pub(crate) value_scales: IntTensor<B>,
    pub(crate) bits: QuantizedBits,
}

#[cfg(feature = "gpu")]
pub(crate) mod kernel {
    //! The pool as kernels take it.

    use cubecl::prelude::*;

    /// The buffers of a pool of quantised slots.
    #[derive(CubeType, CubeLaunch)]
    pub(crate) struct QuantizedSlots {
        pub(crate) key_codes: Box<[u32]>,
        pub(crate) key_scales: Box<[u32]>,
        pub(crate) value_codes: Box<[u32]>,
        pub(crate) value_scales: Box<[u32]>,
    }

    /// [`QuantizedSlots`] in pairs of words.
    #[derive(CubeType, CubeLaunch)]
    pub(crate) struct QuantizedPairs {
        pub(crate) key_codes: Box<[Vector<u32, Const<2>>]>,
        /// One by one: the order in which channels are multiplied is not theirs.
        pub(crate) key_scales: Box<[u32]>,
        pub(crate) value_codes: Box<[Vector<u32, Const<2>>]>,
        pub(crate) value_scales: Box<[Vector<u32, Const<2>>]>,
    }
}
