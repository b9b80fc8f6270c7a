//! Which kernel of an op runs: chosen from the device and the call's shape, or forced.

use std::fmt::Debug;

use burn::tensor::DType;

use crate::KernelError;
use crate::backend::check::Check;

/// What the choice of a kernel asks of a CubeCL device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "a CPU has no choice"))]
pub(crate) struct DeviceTraits {
    /// Processors that run cubes.
    pub(crate) processors: usize,
    /// Units of a plane, at least, and of a cube, at most.
    pub(crate) plane: usize,
    pub(crate) units: usize,
    /// Whether matrix instructions make products of the call's dtype, in planes of 32 units.
    pub(crate) multiplies: bool,
    /// Whether it reads vectors of 16 bytes.
    pub(crate) reads_16_bytes: bool,
    /// Whether the cubes of a cluster write into each other's shared memory.
    pub(crate) clusters: bool,
    /// Bytes of a cube's shared memory, at most.
    pub(crate) shared_memory: usize,
    /// Whether kernels for Hopper GPUs are built, and run.
    pub(crate) hopper: bool,
}

#[cfg(feature = "gpu")]
impl DeviceTraits {
    /// Those of a device, for a call in `dtype`.
    pub(crate) fn of(client: &cubecl::client::Client, dtype: DType) -> Self {
        use crate::backend::client;
        use crate::components::cluster::has_clusters;

        let hardware = &client.properties().hardware;
        Self {
            processors: client::processors(client),
            plane: (hardware.plane_size_min as usize).max(1),
            units: hardware.max_units_per_cube as usize,
            multiplies: client::multiplies(client, dtype),
            reads_16_bytes: client.properties().io_optimized_vector_sizes(2).any(|of| of == 8),
            clusters: has_clusters(client),
            shared_memory: hardware.max_shared_memory_size,
            hopper: cfg!(feature = "cuda") && client::is_hopper(client),
        }
    }
}

/// The kernels of an op, of which callers may force one.
pub(crate) trait Strategy: Copy + Debug + PartialEq {
    /// What the choice asks of a call.
    type Shape;

    /// The kernel that [`Self::choose`] finds.
    const AUTO: Self;

    /// Whether a CPU runs it, too, where it is forced.
    fn serves_cpu(self) -> bool {
        false
    }

    /// The kernel for a call, which serves it.
    #[cfg(feature = "gpu")]
    fn choose(device: &DeviceTraits, shape: &Self::Shape) -> Self;

    /// Why a kernel does not serve a call, if it does not.
    #[cfg(feature = "gpu")]
    fn obstacle(self, device: &DeviceTraits, shape: &Self::Shape) -> Option<&'static str>;

    /// The forced kernel, or else the chosen one.
    #[cfg(feature = "gpu")]
    fn or_chosen(self, device: &DeviceTraits, shape: &Self::Shape) -> Self {
        if self == Self::AUTO { Self::choose(device, shape) } else { self }
    }
}

impl Check {
    /// Refuses a forced strategy that does not serve a call of this dtype and shape.
    pub(crate) fn strategy<S: Strategy>(
        &self,
        strategy: S,
        dtype: DType,
        shape: &S::Shape,
    ) -> Result<(), KernelError> {
        if strategy == S::AUTO {
            return Ok(());
        }
        let why = match self.traits(dtype) {
            #[cfg(feature = "gpu")]
            Some(device) => strategy.obstacle(&device, shape),
            _ if strategy.serves_cpu() => None,
            _ => Some("the CPU runs the op's reference alone"),
        };
        let _ = shape;
        match why {
            Some(why) => {
                let strategy = format!("{strategy:?}");
                Err(KernelError::Unavailable { op: self.op(), strategy, why })
            }
            None => Ok(()),
        }
    }

    /// The kernel for a call: the forced one, checked as by [`Self::strategy`], or the chosen one.
    /// On a CPU, which has no choice, what was asked for.
    pub(crate) fn chosen<S: Strategy>(
        &self,
        strategy: S,
        dtype: DType,
        shape: &S::Shape,
    ) -> Result<S, KernelError> {
        self.strategy(strategy, dtype, shape)?;
        #[cfg(feature = "gpu")]
        if strategy == S::AUTO
            && let Some(device) = self.traits(dtype)
        {
            return Ok(S::choose(&device, shape));
        }
        Ok(strategy)
    }

    /// The device's traits for a call in `dtype`, if it is no CPU.
    fn traits(&self, dtype: DType) -> Option<DeviceTraits> {
        #[cfg(feature = "gpu")]
        if let burn::backend::DispatchDevice::Cube(device) = self.device().as_dispatch() {
            return Some(DeviceTraits::of(&device.client(), dtype));
        }
        let _ = dtype;
        None
    }
}
