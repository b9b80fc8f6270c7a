//! The choice among an op's kernels: from the device and the call's shape, or forced by the caller.

use std::fmt::Debug;

use burn::tensor::DType;

use crate::KernelError;
use crate::backend::check::Check;

/// The properties of a CubeCL device by which kernels are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "a CPU has no choice"))]
pub(crate) struct DeviceTraits {
    /// Processors that run cubes.
    pub(crate) processors: usize,
    /// The least number of units of a plane; and the most units of a cube.
    pub(crate) plane: usize,
    pub(crate) units: usize,
    /// Whether the device has matrix instructions for the call's dtype, in planes of 32 units.
    pub(crate) multiplies: bool,
    /// Whether the device reads vectors of 16 bytes.
    pub(crate) reads_16_bytes: bool,
    /// Whether the device has clusters, whose cubes write into each other's shared memory.
    pub(crate) clusters: bool,
    /// The most bytes of a cube's shared memory.
    pub(crate) shared_memory: usize,
    /// Whether the crate has its kernels for Hopper GPUs, and the device runs them.
    pub(crate) hopper: bool,
}

#[cfg(feature = "gpu")]
impl DeviceTraits {
    /// The traits of a client's device, for a call in `dtype`.
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

    /// The reason why no matrix instructions multiply rows of `head_dim` elements; `None` if they
    /// do.
    pub(crate) fn lacks_products(&self, head_dim: usize) -> Option<&'static str> {
        if !self.multiplies {
            return Some(
                "the device has no matrix instructions for this dtype in planes of 32 units",
            );
        }
        (!head_dim.is_multiple_of(32))
            .then_some("matrix instructions take head dims that are multiples of 32")
    }

    /// The reason why no clusters join the parts of ranges, given whether ranges are long and few
    /// enough for them; `None` if they do.
    pub(crate) fn lacks_clusters(&self, fit: bool) -> Option<&'static str> {
        if !self.clusters {
            return Some("the device has no clusters of cubes");
        }
        (!fit).then_some(
            "ranges are too short for the cubes of a cluster, or too many for clusters that are \
             under way at once",
        )
    }
}

#[cfg(all(test, feature = "gpu"))]
impl DeviceTraits {
    /// An H100, for half precision.
    pub(crate) const H100: Self = Self {
        processors: 132,
        plane: 32,
        units: 1_024,
        multiplies: true,
        reads_16_bytes: true,
        clusters: true,
        shared_memory: 227 << 10,
        hopper: true,
    };
}

/// The kernels of an op, one of which a caller may force.
pub(crate) trait Strategy: Copy + Debug + PartialEq {
    /// The shape of a call, as far as the choice depends on it.
    type Shape;

    /// The value that stands for the choice by [`Self::choose`].
    const AUTO: Self;

    /// Whether a CPU runs this strategy where it is forced.
    fn serves_cpu(self) -> bool {
        false
    }

    /// The kernel for a call. It must be able to run the call.
    #[cfg(feature = "gpu")]
    fn choose(device: &DeviceTraits, shape: &Self::Shape) -> Self;

    /// The reason why this kernel cannot run a call; `None` if it can.
    #[cfg(feature = "gpu")]
    fn obstacle(self, device: &DeviceTraits, shape: &Self::Shape) -> Option<&'static str>;

    /// The forced kernel, or else the chosen one.
    #[cfg(feature = "gpu")]
    fn or_chosen(self, device: &DeviceTraits, shape: &Self::Shape) -> Self {
        if self == Self::AUTO { Self::choose(device, shape) } else { self }
    }
}

impl Check {
    /// Refuses a forced strategy that cannot run a call of this dtype and shape.
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

    /// The kernel for a call: the forced one, checked by [`Self::strategy`], or the chosen one. A
    /// CPU has no choice and gets `strategy` unchanged.
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

    /// The device's traits for a call in `dtype`; `None` on a CPU.
    fn traits(&self, dtype: DType) -> Option<DeviceTraits> {
        #[cfg(feature = "gpu")]
        if let burn::backend::DispatchDevice::Cube(device) = self.device().as_dispatch() {
            return Some(DeviceTraits::of(&device.client(), dtype));
        }
        let _ = dtype;
        None
    }
}
