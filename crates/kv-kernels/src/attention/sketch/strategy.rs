//! Which kernel attends.

#[cfg(feature = "gpu")]
use burn_cubecl::tensor::CubeTensor;

#[cfg(feature = "gpu")]
use super::plan::Plan;
use super::shape::SketchShape;
#[cfg(feature = "gpu")]
use crate::backend::strategy::DeviceTraits;
use crate::backend::strategy::Strategy;

/// A kernel of [`sketch_attention`](crate::sketch_attention).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum SketchStrategy {
    /// The kernel that is expected to be the fastest.
    #[default]
    Auto,
    /// Vector instructions alone, on every CubeCL device.
    Portable,
    /// Matrix instructions, in f16 and bf16. Parts of a head are joined by the cubes of a cluster
    /// or by a launch behind, whichever is expected to be the faster.
    TensorCore,
}

impl Strategy for SketchStrategy {
    type Shape = SketchShape;

    const AUTO: Self = Self::Auto;

    #[cfg(feature = "gpu")]
    fn choose(device: &DeviceTraits, shape: &SketchShape) -> Self {
        // For one query head, a plane's products of whole tiles are more work than a team's of
        // rows: 137 µs against 129 at batch 8 and 4,096 tokens (docs/results/kernels.md).
        let serves = shape.group > 1 && Self::TensorCore.obstacle(device, shape).is_none();
        if serves { Self::TensorCore } else { Self::Portable }
    }

    #[cfg(feature = "gpu")]
    fn obstacle(self, device: &DeviceTraits, shape: &SketchShape) -> Option<&'static str> {
        match self {
            Self::Auto | Self::Portable => None,
            Self::TensorCore if !device.multiplies => {
                Some("the device has no matrix instructions for this dtype in planes of 32 units")
            }
            Self::TensorCore if !shape.head_dim.is_multiple_of(32) => {
                Some("matrix instructions take head dims that are multiples of 32")
            }
            Self::TensorCore => Plan::tiles(device, shape)
                .is_none()
                .then_some("shared memory has no room for the sums of a cube"),
        }
    }
}

#[cfg(feature = "gpu")]
impl SketchStrategy {
    /// How a call is laid out on the device of its query.
    pub(super) fn plan(self, query: &CubeTensor, shape: &SketchShape) -> Plan {
        let device = DeviceTraits::of(&query.client, query.dtype);
        let tiles = match self.or_chosen(&device, shape) {
            Self::TensorCore => Plan::tiles(&device, shape),
            Self::Auto | Self::Portable => None,
        };
        tiles.unwrap_or_else(|| Plan::plain(query, shape))
    }
}
