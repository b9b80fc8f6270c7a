//! Which kernels choose.

use super::shape::CisShape;
#[cfg(feature = "gpu")]
use super::sizes::Sizes;
#[cfg(feature = "gpu")]
use crate::backend::strategy::DeviceTraits;
use crate::backend::strategy::Strategy;

/// The kernels of [`cis_select`](crate::cis_select) and
/// [`cis_attention`](crate::cis_attention).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CisStrategy {
    /// The kernels that are expected to be the fastest.
    #[default]
    Auto,
    /// One cube a range scores its slots and selects among them, by digits of their scores.
    Radix,
    /// Several cubes a range score its slots, and one selects among them, by digits of their
    /// scores.
    SplitRadix,
    /// Several cubes a range score its slots and select among them, by a histogram of their scores.
    Histogram,
    /// One cube a range selects and attends, by matrix instructions: of
    /// [`cis_attention`](crate::cis_attention) alone. Where sets are shared, several
    /// cubes a range score before.
    Fused,
}

impl Strategy for CisStrategy {
    type Shape = CisShape;

    const AUTO: Self = Self::Auto;

    #[cfg(feature = "gpu")]
    fn choose(device: &DeviceTraits, shape: &CisShape) -> Self {
        let sizes = Sizes { device: *device, shape: *shape };
        // One launch for choice and attention is not measured against two, nor the lengths from
        // which on a histogram selects (docs/results/kernels.md has its times from 32k on).
        if sizes.fuses() {
            Self::Fused
        } else if sizes.is_long() && sizes.has_room_for_histogram() {
            Self::Histogram
        } else if sizes.splits() > 1 {
            Self::SplitRadix
        } else {
            Self::Radix
        }
    }

    #[cfg(feature = "gpu")]
    fn obstacle(self, device: &DeviceTraits, shape: &CisShape) -> Option<&'static str> {
        let sizes = Sizes { device: *device, shape: *shape };
        match self {
            Self::Auto | Self::Radix | Self::SplitRadix => None,
            Self::Histogram => (!sizes.has_room_for_histogram())
                .then_some("shared memory has no room for bins, or there are too many ranges"),
            Self::Fused if shape.attends.is_none() => {
                Some("the kernel attends, too: `cis_attention` takes it")
            }
            Self::Fused => sizes.fused().is_none().then_some(
                "the device has no matrix instructions for this dtype and head dim, or shared \
                 memory no room for a range's scores and what is attended to",
            ),
        }
    }
}
