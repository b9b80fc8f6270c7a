//! The tensors of a pool of quantised slots.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::{DType, Device, Int, Tensor};

use super::layout::{BLOCK, MOST_BITS, words};
use crate::KernelError;
use crate::backend::check::Check;

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
/// `round((x − minimum) / step)`.
#[derive(Debug, Clone)]
pub struct QuantizedPool {
    /// `[S, words]`, 32-bit: a key's codes, the first in the lowest bits.
    pub key_codes: Tensor<2, Int>,
    /// `[S / BLOCK, D]`, 32-bit: the step in the upper half and the minimum in the lower half, the
    /// upper 16 bits of an f32 each.
    pub key_scales: Tensor<2, Int>,
    /// `[S, words]`, 32-bit: a value's codes.
    pub value_codes: Tensor<2, Int>,
    /// `[S]`, 32-bit: step and minimum of a slot's value.
    pub value_scales: Tensor<1, Int>,
    /// Bits of a number.
    pub bits: QuantizedBits,
}

impl QuantizedPool {
    /// Slots of a block.
    pub const BLOCK: usize = BLOCK;

    /// A pool of `blocks` blocks, at least one, whose contents are zeros.
    pub fn new(blocks: usize, head_dim: usize, bits: QuantizedBits, device: &Device) -> Self {
        let blocks = blocks.max(1);
        let slots = blocks * BLOCK;
        // Flat first: some devices pad the rows of a matrix of zeros.
        let zeros = |rows: usize, width: usize| {
            Tensor::<1, Int>::zeros([rows * width], (device, DType::I32)).reshape([rows, width])
        };
        Self {
            key_codes: zeros(slots, words(head_dim, bits.keys)),
            key_scales: zeros(blocks, head_dim),
            value_codes: zeros(slots, words(head_dim, bits.values)),
            value_scales: Tensor::zeros([slots], (device, DType::I32)),
            bits,
        }
    }

    /// Bytes of a slot of `head_dim` numbers in a pool of these bits, its share of the block's
    /// minima and steps included.
    pub fn slot_bytes(head_dim: usize, bits: QuantizedBits) -> f64 {
        let codes = words(head_dim, bits.keys) + words(head_dim, bits.values);
        4.0 * (codes as f64 + 1.0 + head_dim as f64 / BLOCK as f64)
    }

    /// Bytes of the pool.
    pub fn bytes(&self) -> usize {
        let of = |[rows, width]: [usize; 2]| rows * width * 4;
        let codes = of(self.key_codes.dims()) + of(self.value_codes.dims());
        codes + of(self.key_scales.dims()) + self.value_scales.dims()[0] * 4
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
        check.shape("key_codes", &self.key_codes, &[slots, words(head_dim, keys)])?;
        check.shape("key_scales", &self.key_scales, &[slots / BLOCK, head_dim])?;
        check.shape("value_codes", &self.value_codes, &[slots, words(head_dim, values)])?;
        check.counted("key_codes", &self.key_codes)?;
        check.int("key_codes", &self.key_codes)?;
        check.int("key_scales", &self.key_scales)?;
        check.int("value_codes", &self.value_codes)?;
        check.int("value_scales", &self.value_scales)
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
    /// `[S, words]`
    pub(crate) key_codes: IntTensor<B>,
    /// `[S / BLOCK, D]`
    pub(crate) key_scales: IntTensor<B>,
    /// `[S, words]`
    pub(crate) value_codes: IntTensor<B>,
    /// `[S]`
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
}
