//! Which kernel attends.

#[cfg(feature = "gpu")]
use crate::backend::strategy::DeviceTraits;
use crate::backend::strategy::Strategy;

/// A kernel of [`prefill_attention`](crate::prefill_attention).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PrefillStrategy {
    /// The kernel that is expected to be the fastest.
    #[default]
    Auto,
    /// Blocks of queries by products of the tensor library, on every device, the CPU included.
    Blocks,
    /// One kernel of warp groups and tensor maps for Hopper GPUs, in f16 and bf16.
    Hopper,
}

/// What the choice of a kernel asks of a call.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "a CPU has no choice"))]
pub(crate) struct PrefillShape {
    pub(crate) head_dim: usize,
    /// Whether elements have two bytes.
    pub(crate) halves: bool,
}

impl Strategy for PrefillStrategy {
    type Shape = PrefillShape;

    const AUTO: Self = Self::Auto;

    fn serves_cpu(self) -> bool {
        self == Self::Blocks
    }

    #[cfg(feature = "gpu")]
    fn choose(device: &DeviceTraits, shape: &PrefillShape) -> Self {
        // Faster at every length, by more the longer the prompt: 6.6 µs instead of 83 at 128 tokens
        // of 32 heads on an H200, 1.09 ms instead of 99 at 8,192 (docs/results/kernels.md).
        match Self::Hopper.obstacle(device, shape) {
            None => Self::Hopper,
            Some(_) => Self::Blocks,
        }
    }

    #[cfg(feature = "gpu")]
    fn obstacle(self, device: &DeviceTraits, shape: &PrefillShape) -> Option<&'static str> {
        match self {
            Self::Auto | Self::Blocks => None,
            Self::Hopper if !device.hopper => {
                Some("the device is no Hopper GPU, or the crate is built without `cuda`")
            }
            Self::Hopper if !shape.halves => Some("the kernel takes f16 and bf16"),
            Self::Hopper if !matches!(shape.head_dim, 64 | 128) => {
                Some("the kernel takes head dims of 64 and 128")
            }
            Self::Hopper => None,
        }
    }
}
