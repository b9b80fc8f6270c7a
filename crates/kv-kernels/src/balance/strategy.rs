//! Which kernel walks.

#[cfg(feature = "gpu")]
use crate::backend::strategy::DeviceTraits;
use crate::backend::strategy::Strategy;

/// A kernel of [`balance`](crate::balance).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum BalanceStrategy {
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
pub(crate) struct BalanceShape {
    pub(crate) head_dim: usize,
    /// Tokens that get one sign.
    pub(crate) span: usize,
}

impl Strategy for BalanceStrategy {
    type Shape = BalanceShape;

    const AUTO: Self = Self::Auto;

    #[cfg(feature = "gpu")]
    fn choose(device: &DeviceTraits, shape: &BalanceShape) -> Self {
        // Wherever it serves: 664 µs became 252 (docs/results/kernels.md).
        match Self::TensorCore.obstacle(device, shape) {
            None => Self::TensorCore,
            Some(_) => Self::Portable,
        }
    }

    #[cfg(feature = "gpu")]
    fn obstacle(self, device: &DeviceTraits, shape: &BalanceShape) -> Option<&'static str> {
        match self {
            Self::Auto | Self::Portable => None,
            // Each plane holds tokens of its own. A span may lie across the border of two planes.
            Self::TensorCore if shape.span > 1 => Some("spans of several tokens"),
            Self::TensorCore => device.lacks_products(shape.head_dim),
        }
    }
}
