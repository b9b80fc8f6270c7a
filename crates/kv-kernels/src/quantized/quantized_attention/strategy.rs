//! Which kernel attends.

#[cfg(feature = "gpu")]
use super::kernel_args::Blueprint;
#[cfg(feature = "gpu")]
use super::tensor_core::{LARGEST, LARGEST_GROUP, MOST_BITS};
#[cfg(feature = "gpu")]
use crate::backend::strategy::DeviceTraits;
use crate::backend::strategy::Strategy;
use crate::quantized::pool::QuantizedBits;

/// A kernel of [`quantized_attention`](crate::quantized_attention).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum QuantizedStrategy {
    /// The kernel that is expected to be the fastest.
    #[default]
    Auto,
    /// Vector instructions alone, on every CubeCL device.
    Portable,
    /// Products by matrix instructions in bf16, of factors in two bf16 numbers each.
    TensorCore,
}

/// What the choice of a kernel asks of a call.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "a CPU has no choice"))]
pub(crate) struct QuantizedShape {
    pub(crate) group: usize,
    pub(crate) head_dim: usize,
    pub(crate) bits: QuantizedBits,
    /// Whether queries are f32, whose last bits the factors of matrix instructions lose.
    pub(crate) full: bool,
}

impl Strategy for QuantizedStrategy {
    type Shape = QuantizedShape;

    const AUTO: Self = Self::Auto;

    #[cfg(feature = "gpu")]
    fn choose(device: &DeviceTraits, shape: &QuantizedShape) -> Self {
        // Faster at every size: 6.8 µs for 13.2 at 512 slots and batch 1 on an H200, 32.5 for 57.5
        // at 3,712 slots and batch 8 (docs/results/kernels.md).
        match Self::TensorCore.obstacle(device, shape) {
            None if !shape.full => Self::TensorCore,
            _ => Self::Portable,
        }
    }

    #[cfg(feature = "gpu")]
    fn obstacle(self, device: &DeviceTraits, shape: &QuantizedShape) -> Option<&'static str> {
        let QuantizedShape { group, head_dim, bits, .. } = *shape;
        match self {
            Self::Auto | Self::Portable => None,
            Self::TensorCore if !device.multiplies => {
                Some("the device has no matrix instructions for bf16 in planes of 32 units")
            }
            Self::TensorCore if !device.reads_16_bytes => {
                Some("the device reads no vectors of 16 bytes")
            }
            Self::TensorCore if !head_dim.is_multiple_of(32) || head_dim > LARGEST => {
                Some("the kernel takes head dims that are multiples of 32, up to 256")
            }
            Self::TensorCore if group > LARGEST_GROUP => {
                Some("the kernel takes up to 8 query heads a key-value head")
            }
            Self::TensorCore if bits.keys > MOST_BITS || bits.values > MOST_BITS => {
                Some("the kernel takes up to 7 bits a number")
            }
            Self::TensorCore => {
                let blueprint = Blueprint { group, head_dim, bits, planes: 0, room: 0 };
                (blueprint.shared_bytes() > device.shared_memory)
                    .then_some("shared memory has no room for the factors of a cube's planes")
            }
        }
    }
}
