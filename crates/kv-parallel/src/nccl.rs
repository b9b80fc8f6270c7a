//! Ranks with a GPU each, which add through NCCL.

use std::env;

use burn::tensor::distributed::{ReduceOperation, all_reduce};
use burn::tensor::{Device, DeviceType, Tensor};
use kv_kernels::{LinearOptions, linear};

use crate::processes::environment::NCCL;
use crate::{Collective, Direct, ParallelError, Result, Shard};

/// The library, as it is loaded at run time.
const LIBRARY: &str = "libnccl.so";

/// One rank of a group of processes on one host, each with its own GPU. Rank `r` has CUDA device
/// `r`, and every process sees all devices: CubeCL numbers NCCL's ranks by them.
///
/// Sums are queued on the device, and may be part of a recording.
#[derive(Debug)]
pub struct Nccl {
    shard: Shard,
    devices: Vec<Device>,
    /// Adds small tensors.
    direct: Option<Direct>,
}

impl Nccl {
    /// A rank. The ranks meet in the first sum.
    ///
    /// # Errors
    /// [`ParallelError::Nccl`] where there are fewer devices than ranks, where the library cannot
    /// be loaded, and where the environment does not say at which address ranks meet.
    pub fn new(shard: Shard) -> Result<Self> {
        let refuse = |reason: String| Err(ParallelError::Nccl { reason });
        let devices: Vec<Device> = Device::enumerate(DeviceType::Cuda).into_vec();
        let (found, world) = (devices.len(), shard.world());
        if found < world {
            return refuse(format!(
                "{world} ranks need a GPU each, and every process must see all of them, but \
                 {found} were found"
            ));
        }
        if env::var_os(NCCL).is_none() {
            return refuse(format!("set {NCCL} to an address and a port of rank 0's host"));
        }
        // SAFETY: NCCL's initialisers only register the library; CubeCL loads it again by this
        // name.
        if let Err(error) = unsafe { libloading::Library::new(LIBRARY) } {
            return refuse(format!(
                "{LIBRARY} cannot be loaded ({error}). Install NCCL, or put the folder of a link \
                 of that name to libnccl.so.2 on LD_LIBRARY_PATH"
            ));
        }
        Ok(Self { shard, devices: devices.into_iter().take(world).collect(), direct: None })
    }

    /// Adds small tensors by kernels that write into the other ranks' memory. All ranks must.
    #[must_use]
    pub fn with_direct(self, direct: Direct) -> Self {
        Self { direct: Some(direct), ..self }
    }

    /// This rank's device.
    pub fn device(&self) -> &Device {
        &self.devices[self.shard.rank()]
    }
}

impl Collective for Nccl {
    fn shard(&self) -> Shard {
        self.shard
    }

    fn all_reduce(&self, tensor: Tensor<2>) -> Result<Tensor<2>> {
        if let Some(direct) = self.direct.as_ref().filter(|_| Direct::takes(&tensor)) {
            return direct.all_reduce(tensor);
        }
        Ok(all_reduce(tensor, ReduceOperation::Sum, self.devices.clone()).resolve())
    }

    fn linear_all_reduce(
        &self,
        x: Tensor<2>,
        weight: Tensor<2>,
        options: LinearOptions,
    ) -> Result<Tensor<2>> {
        if let Some(direct) = &self.direct
            && let Some(sum) = direct.linear(&x, &weight, &options)?
        {
            return Ok(sum);
        }
        self.all_reduce(linear(x, weight, options)?)
    }
}
