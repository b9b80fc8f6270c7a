use std::fmt::Debug;

use burn::tensor::Tensor;
use kv_kernels::{LinearOptions, linear};

use crate::{Result, Shard};

/// How the ranks of a group add their tensors.
///
/// All ranks call the same operations in the same order. An operation returns on a rank once all
/// ranks have called it, or earlier where it only queues work on a device.
pub trait Collective: Debug + Send + Sync {
    /// This rank's share.
    fn shard(&self) -> Shard;

    /// The sum over all ranks of tensors of one shape, with equal bits on every rank. Devices that
    /// can add in place do so where `tensor` is the only handle.
    ///
    /// # Errors
    /// [`crate::ParallelError`] where a rank has left, or does not come in time.
    fn all_reduce(&self, tensor: Tensor<2>) -> Result<Tensor<2>>;

    /// The sum over all ranks of [`linear`], whose `x` and `weight` are each rank's columns. Ranks
    /// that can add within the product do.
    ///
    /// # Errors
    /// The errors of [`linear`] and of [`Self::all_reduce`].
    fn linear_all_reduce(
        &self,
        x: Tensor<2>,
        weight: Tensor<2>,
        options: LinearOptions,
    ) -> Result<Tensor<2>> {
        self.all_reduce(linear(x, weight, options)?)
    }
}

/// One rank with the whole model.
#[derive(Debug, Clone, Copy, Default)]
pub struct Solo;

impl Collective for Solo {
    fn shard(&self) -> Shard {
        Shard::WHOLE
    }

    fn all_reduce(&self, tensor: Tensor<2>) -> Result<Tensor<2>> {
        Ok(tensor)
    }
}
