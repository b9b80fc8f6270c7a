//! The tensors of a pool of slots, and the ranges of slots that belong to each head.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, ExtensionType};
use burn::tensor::{Int, Tensor};

use crate::backend::check::Check;
use crate::backend::optional::OptionalFloat;
#[cfg(feature = "gpu")]
use crate::components::pool::PoolSlotsLaunch;
use crate::{KernelError, Reading};
#[cfg(feature = "gpu")]
use cubecl::prelude::CubePrimitive;

/// The slots of a pool that belong to each (sequence, key-value head). The numbers are on the
/// device, so that a decode step can run, and be captured as a graph, without the host.
#[derive(Debug, Clone)]
pub struct SlotRanges {
    /// The first slot of each range, `[B, Hkv]`, 32-bit integers.
    pub offsets: Tensor<2, Int>,
    /// Live slots of each range, `[B, Hkv]`, 32-bit integers.
    pub lengths: Tensor<2, Int>,
}

impl SlotRanges {
    /// Checks that all ranges lie within a pool of `slots` slots, for callers who make their own
    /// ranges. This waits for the device. Ops do not check ranges.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] for the first slot outside the pool, and for a negative length;
    /// [`KernelError::Shape`] and [`KernelError::Dtype`].
    pub fn validate(&self, slots: usize) -> Result<(), KernelError> {
        const OP: &str = "slot_ranges";
        let check = Check::new(OP, &self.offsets);
        let [batch, kv_heads] = self.offsets.dims();
        check.ranges(self, batch, kv_heads)?;
        let read = |tensor: &Tensor<2, Int>| Reading::begin(tensor.clone().flatten(0, 1))?.wait();
        let (offsets, lengths) = (read(&self.offsets)?, read(&self.lengths)?);
        for (first, length) in offsets.into_iter().zip(lengths) {
            within(OP, "lengths", i64::from(length), slots + 1)?;
            if length > 0 {
                within(OP, "offsets", i64::from(first), slots)?;
                within(OP, "lengths", i64::from(first) + i64::from(length) - 1, slots)?;
            }
        }
        Ok(())
    }
}

impl Check {
    /// Checks the shapes and dtypes of ranges `[batch, kv_heads]`, 32-bit.
    pub(crate) fn ranges(
        &self,
        ranges: &SlotRanges,
        batch: usize,
        kv_heads: usize,
    ) -> Result<(), KernelError> {
        self.shape("offsets", &ranges.offsets, &[batch, kv_heads])?;
        self.shape("lengths", &ranges.lengths, &[batch, kv_heads])?;
        self.int("offsets", &ranges.offsets)?;
        self.int("lengths", &ranges.lengths)
    }
}

/// Refuses an index outside `0..count`.
pub(crate) fn within(
    op: &'static str,
    argument: &'static str,
    index: i64,
    count: usize,
) -> Result<(), KernelError> {
    if usize::try_from(index).is_ok_and(|index| index < count) {
        return Ok(());
    }
    Err(KernelError::OutOfRange { op, argument, expected: count, actual: index })
}

/// The tensors of a cache, to be written in place.
///
/// On a CubeCL device every clone of a tensor sees the writes. On the CPU a shared tensor is copied
/// first, so the pool should hold the only references. Tensors with gaps between rows (padding of
/// some devices, or views) are replaced by copies without gaps.
#[derive(Debug)]
pub struct SlotPool<'a> {
    /// `[S, D]`
    pub keys: &'a mut Tensor<2>,
    /// `[S, D]`, of the keys' dtype.
    pub values: &'a mut Tensor<2>,
    /// Logical positions, `[S]`, 32-bit.
    pub positions: &'a mut Tensor<1, Int>,
    /// Logarithms of weights, `[S]`, f32; new tokens have weight 1.
    pub log_weights: Option<&'a mut Tensor<1>>,
}

/// The tensors of a pool of slots, to be read.
#[derive(Debug, Clone, Copy)]
pub struct SlotSource<'a> {
    /// `[S, D]`
    pub keys: &'a Tensor<2>,
    /// `[S, D]`, of the keys' dtype.
    pub values: &'a Tensor<2>,
    /// Logical positions, `[S]`, 32-bit.
    pub positions: &'a Tensor<1, Int>,
    /// Logarithms of weights, `[S]`, f32; `None` means that all weights are 1.
    pub log_weights: Option<&'a Tensor<1>>,
}

impl SlotPool<'_> {
    pub(crate) fn source(&self) -> SlotSource<'_> {
        SlotSource {
            keys: self.keys,
            values: self.values,
            positions: self.positions,
            log_weights: self.log_weights.as_deref(),
        }
    }

    pub(crate) fn check(&self, check: &Check, head_dim: usize) -> Result<(), KernelError> {
        self.source().check(check, head_dim)
    }

    /// Takes the tensors, until [`Self::put_back`].
    pub(crate) fn take(&mut self, check: &Check) -> SlotPools<Dispatch> {
        let log_weights = self.log_weights.as_deref_mut().map(|weights| check.take(weights));
        SlotPools {
            keys: check.take(self.keys).into_dispatch(),
            values: check.take(self.values).into_dispatch(),
            positions: check.take_ints(self.positions).into_dispatch(),
            log_weights: log_weights.into(),
        }
    }

    pub(crate) fn put_back(self, pools: SlotPools<Dispatch>) {
        *self.keys = Tensor::from_dispatch(pools.keys);
        *self.values = Tensor::from_dispatch(pools.values);
        *self.positions = Tensor::from_dispatch(pools.positions);
        if let Some((own, written)) = self.log_weights.zip(pools.log_weights.into_option()) {
            *own = Tensor::from_dispatch(written);
        }
    }
}

impl SlotSource<'_> {
    pub(crate) fn check(&self, check: &Check, head_dim: usize) -> Result<(), KernelError> {
        let slots = self.keys.dims()[0];
        check.shape("keys", self.keys, &[slots, head_dim])?;
        check.shape("values", self.values, &[slots, head_dim])?;
        check.float("keys", self.keys)?;
        check.same_dtype("values", self.values, "the keys' dtype", self.keys.dtype())?;
        check.shape("slot positions", self.positions, &[slots])?;
        check.int("slot positions", self.positions)?;
        if let Some(log_weights) = self.log_weights {
            check.shape("log_weights", log_weights, &[slots])?;
            check.f32("log_weights", log_weights)?;
        }
        Ok(())
    }

    pub(crate) fn tensors(&self) -> SlotPools<Dispatch> {
        SlotPools {
            keys: self.keys.clone().into_dispatch(),
            values: self.values.clone().into_dispatch(),
            positions: self.positions.clone().into_dispatch(),
            log_weights: self.log_weights.cloned().into(),
        }
    }
}

/// The tensors of a cache, to be written in place, as backends take them.
#[derive(ExtensionType)]
pub(crate) struct SlotPools<B: Backend> {
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) values: FloatTensor<B>,
    /// `[S]`
    pub(crate) positions: IntTensor<B>,
    /// `[S]`
    #[extension_type]
    pub(crate) log_weights: OptionalFloat<B>,
}

#[cfg(feature = "gpu")]
impl<B: Backend> SlotPools<B> {
    /// Whether slots have weights.
    pub(crate) fn weighted(&self) -> bool {
        self.log_weights.as_ref().is_some()
    }
}

#[cfg(feature = "gpu")]
impl SlotPools<burn_cubecl::CubeBackend> {
    /// The tensors without gaps between rows: unchanged, or copies that replace them.
    pub(crate) fn packed(self) -> Self {
        use burn_cubecl::kernel::into_contiguous;

        Self {
            keys: into_contiguous(self.keys),
            values: into_contiguous(self.values),
            positions: into_contiguous(self.positions),
            log_weights: self.log_weights.map(into_contiguous),
        }
    }

    /// The tensors as a kernel's argument.
    pub(crate) fn launched<R: CubePrimitive>(&self) -> PoolSlotsLaunch<R> {
        PoolSlotsLaunch::new(
            self.keys.clone().into_buffer_arg(),
            self.values.clone().into_buffer_arg(),
            self.positions.clone().into_buffer_arg(),
            self.log_weights.clone().or_new(&self.keys).into_buffer_arg(),
        )
    }
}
