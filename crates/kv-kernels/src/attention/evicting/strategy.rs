//! Which kernel attends, and so which may choose the slot.

use crate::DecodeStrategy;
use crate::attention::decode::strategy::DecodeShape;
#[cfg(feature = "gpu")]
use crate::backend::strategy::DeviceTraits;
use crate::backend::strategy::Strategy;

/// A kernel of [`evicting_attention`](crate::evicting_attention).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum EvictionStrategy {
    /// The kernel that is expected to be the fastest.
    #[default]
    Auto,
    /// Vector instructions alone, on every CubeCL device. A launch behind chooses the slot.
    Portable,
    /// Matrix instructions, in f16 and bf16. The attention's launch chooses the slot where a cube
    /// or a cluster has a whole head and room for its logits, and a launch behind elsewhere.
    TensorCore,
}

impl EvictionStrategy {
    /// The attention's.
    pub(super) fn attention(self) -> DecodeStrategy {
        match self {
            Self::Portable => DecodeStrategy::Portable,
            // Which of its kernels is left to the attention: clusters decide where they can.
            Self::Auto | Self::TensorCore => DecodeStrategy::Auto,
        }
    }
}

impl Strategy for EvictionStrategy {
    type Shape = DecodeShape;

    const AUTO: Self = Self::Auto;

    #[cfg(feature = "gpu")]
    fn choose(device: &DeviceTraits, shape: &DecodeShape) -> Self {
        match DecodeStrategy::choose(device, shape) {
            DecodeStrategy::Portable => Self::Portable,
            _ => Self::TensorCore,
        }
    }

    #[cfg(feature = "gpu")]
    fn obstacle(self, device: &DeviceTraits, shape: &DecodeShape) -> Option<&'static str> {
        match self {
            Self::Auto | Self::Portable => None,
            Self::TensorCore => DecodeStrategy::TensorCore.obstacle(device, shape),
        }
    }
}
