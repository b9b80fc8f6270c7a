//! Which kernel multiplies.

use super::SKINNY;
#[cfg(feature = "gpu")]
use super::tiling::Tiling;
#[cfg(feature = "gpu")]
use crate::backend::strategy::DeviceTraits;
use crate::backend::strategy::Strategy;

/// A kernel of [`linear`](crate::linear).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum LinearStrategy {
    /// The kernel that is expected to be the fastest.
    #[default]
    Auto,
    /// Up to 32 rows by vector instructions alone, on every CubeCL device.
    Portable,
    /// Up to 32 rows by matrix instructions, in f16 and bf16.
    TensorCore,
    /// Up to 32 rows, with weights that stream through tensor maps: for Hopper GPUs, in f16 and
    /// bf16.
    HopperSkinny,
    /// Any number of rows, in tiles of warp groups whose sums several cubes share: for Hopper GPUs,
    /// in f16 and bf16, where tiles are fewer than processors.
    HopperSplit,
    /// Any number of rows, in tiles of warp groups: for Hopper GPUs, in f16 and bf16.
    HopperWide,
    /// Any number of rows, by the product of the tensor library, on every device, the CPU included.
    Matmul,
}

/// What the choice of a kernel asks of a call.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "a CPU has no choice"))]
pub(crate) struct LinearShape {
    pub(crate) rows: usize,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// Whether elements have two bytes.
    pub(crate) halves: bool,
}

impl LinearStrategy {
    /// Whether few rows are computed each by itself, where so many rows are given.
    pub(super) fn is_skinny(self, rows: usize) -> bool {
        match self {
            Self::Auto => rows <= SKINNY,
            Self::Portable | Self::TensorCore | Self::HopperSkinny => true,
            Self::HopperSplit | Self::HopperWide | Self::Matmul => false,
        }
    }
}

impl Strategy for LinearStrategy {
    type Shape = LinearShape;

    const AUTO: Self = Self::Auto;

    fn serves_cpu(self) -> bool {
        self == Self::Matmul
    }

    #[cfg(feature = "gpu")]
    fn choose(device: &DeviceTraits, shape: &LinearShape) -> Self {
        let serves = |strategy: &Self| strategy.obstacle(device, shape).is_none();
        // The first that serves is the fastest. On an H200, 32 x 4096 x 4096 takes 11.1 µs by
        // `HopperSkinny`, 16.5 by `TensorCore`, 141 by `Portable` and 24.6 by `HopperWide`, which
        // takes 24.9 at 64 rows and 25.3 at 128 (docs/results/kernels.md).
        let few = [Self::HopperSkinny, Self::TensorCore, Self::Portable];
        let many = [Self::HopperSplit, Self::HopperWide, Self::Matmul];
        let sizes = [shape.rows, shape.outputs, shape.inputs];
        let candidates = match shape.rows <= SKINNY {
            true => &few[..],
            false if Tiling::of(sizes, device.processors, true).parts > 1 => &many[..],
            false => &many[1..],
        };
        candidates.iter().copied().find(serves).unwrap_or(Self::Matmul)
    }

    #[cfg(feature = "gpu")]
    fn obstacle(self, device: &DeviceTraits, shape: &LinearShape) -> Option<&'static str> {
        let skinny = self != Self::Auto && self.is_skinny(shape.rows);
        if skinny && shape.rows > SKINNY {
            return Some("the kernel takes up to 32 rows");
        }
        match self {
            Self::Auto | Self::Portable | Self::Matmul => None,
            Self::TensorCore if !device.multiplies => {
                Some("the device has no matrix instructions for this dtype in planes of 32 units")
            }
            Self::TensorCore => (!shape.inputs.is_multiple_of(32))
                .then_some("matrix instructions take numbers of inputs that are multiples of 32"),
            Self::HopperSkinny | Self::HopperSplit | Self::HopperWide if !device.hopper => {
                Some("the device is no Hopper GPU, or the crate is built without `cuda`")
            }
            Self::HopperSkinny | Self::HopperSplit | Self::HopperWide if !shape.halves => {
                Some("the kernel takes f16 and bf16")
            }
            Self::HopperSkinny | Self::HopperSplit | Self::HopperWide
                if !copies_rows_of(shape.inputs) =>
            {
                Some("tensor maps take multiples of 8 inputs, at least 64")
            }
            // Results are written in pairs.
            Self::HopperSplit | Self::HopperWide if !shape.outputs.is_multiple_of(2) => {
                Some("the kernel takes even numbers of outputs")
            }
            Self::HopperSkinny | Self::HopperSplit | Self::HopperWide => None,
        }
    }
}

#[cfg(feature = "cuda")]
use crate::components::tma::copies_rows_of;

/// No device is a Hopper GPU without `cuda`.
#[cfg(all(feature = "gpu", not(feature = "cuda")))]
fn copies_rows_of(_inputs: usize) -> bool {
    false
}
