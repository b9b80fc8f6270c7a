//! Which kernel pairs.

#[cfg(feature = "gpu")]
use super::tensor_core::Blueprint;
#[cfg(feature = "gpu")]
use crate::backend::strategy::DeviceTraits;
use crate::backend::strategy::Strategy;

/// A kernel of [`nearest_slots`](crate::nearest_slots).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum NearestSlotsStrategy {
    /// The kernel that is expected to be the fastest.
    #[default]
    Auto,
    /// Vector instructions alone, on every CubeCL device.
    Portable,
    /// Products by matrix instructions, in f16 and bf16.
    TensorCore,
}

/// What the choice of a kernel asks of a call.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "a CPU has no choice"))]
pub(crate) struct NearestSlotsShape {
    pub(crate) head_dim: usize,
}

impl Strategy for NearestSlotsStrategy {
    type Shape = NearestSlotsShape;

    const AUTO: Self = Self::Auto;

    #[cfg(feature = "gpu")]
    fn choose(device: &DeviceTraits, shape: &NearestSlotsShape) -> Self {
        // Faster at every size: 28 µs instead of 92 for 8 lists of 512 slots on an H200, 412
        // instead of 3,860 for 128 lists of 2,048 (docs/results/kernels.md).
        match Self::TensorCore.obstacle(device, shape) {
            None => Self::TensorCore,
            Some(_) => Self::Portable,
        }
    }

    #[cfg(feature = "gpu")]
    fn obstacle(self, device: &DeviceTraits, shape: &NearestSlotsShape) -> Option<&'static str> {
        match self {
            Self::Auto | Self::Portable => None,
            Self::TensorCore if !device.multiplies => {
                Some("the device has no matrix instructions for this dtype in planes of 32 units")
            }
            Self::TensorCore if !device.reads_16_bytes => {
                Some("the device reads no vectors of 16 bytes")
            }
            Self::TensorCore => (!Blueprint::serves(shape.head_dim))
                .then_some("the kernel takes head dims that are multiples of 32, up to 256"),
        }
    }
}
