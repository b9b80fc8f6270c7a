//! Which kernel scores.

#[cfg(feature = "gpu")]
use super::tensor_core::{LARGEST, LARGEST_GROUP};
#[cfg(feature = "gpu")]
use crate::backend::strategy::DeviceTraits;
use crate::backend::strategy::Strategy;

/// A kernel of [`signature_scores`](crate::signature_scores).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum SignatureStrategy {
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
pub(crate) struct SignatureShape {
    pub(crate) group: usize,
    pub(crate) head_dim: usize,
    /// Whether queries are f32, whose last bits the factors of matrix instructions lose.
    pub(crate) full: bool,
}

impl Strategy for SignatureStrategy {
    type Shape = SignatureShape;

    const AUTO: Self = Self::Auto;

    #[cfg(feature = "gpu")]
    fn choose(device: &DeviceTraits, shape: &SignatureShape) -> Self {
        match Self::TensorCore.obstacle(device, shape) {
            None if !shape.full => Self::TensorCore,
            _ => Self::Portable,
        }
    }

    #[cfg(feature = "gpu")]
    fn obstacle(self, device: &DeviceTraits, shape: &SignatureShape) -> Option<&'static str> {
        let SignatureShape { group, head_dim, .. } = *shape;
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
            Self::TensorCore => None,
        }
    }
}
