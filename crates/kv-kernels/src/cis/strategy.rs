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
        // Times of an H200 in groups of four, 512 slots read of each range
        // (docs/results/kernels.md):
        // - Fused, where ranges fill the device and share no sets: 49 µs at 16x32x8x2048, where
        //   Radix takes 54 and SplitRadix 56, and 134 at 16x32x8x8192 (146, 160).
        // - Histogram, where ranges are long: 43 µs at 1x32x8x8192, where SplitRadix takes 71, and
        //   64 at 1x32x8x32768 (130). With 128 ranges of 32,768 slots it is slower where all
        //   retrieve (503, 463), and faster where all share (27, 36).
        // - SplitRadix, where ranges leave processors idle: 30 µs at 1x32x8x2048, where Radix takes
        //   36.
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
