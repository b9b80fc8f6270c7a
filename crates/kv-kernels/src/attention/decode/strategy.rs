//! Which kernel attends.

#[cfg(feature = "gpu")]
use super::plan;
#[cfg(feature = "gpu")]
use crate::backend::strategy::DeviceTraits;
use crate::backend::strategy::Strategy;

/// A kernel of [`decode_attention`](crate::decode_attention).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DecodeStrategy {
    /// The kernel that is expected to be the fastest.
    #[default]
    Auto,
    /// Vector instructions alone, on every CubeCL device.
    Portable,
    /// Matrix instructions, in f16 and bf16. Parts of a head are joined by a launch behind.
    TensorCore,
    /// Matrix instructions, in f16 and bf16. The cubes of a cluster have the parts of a head, and
    /// join them.
    TensorCoreCluster,
}

/// What the choice of a kernel asks of a call.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "a CPU has no choice"))]
pub(crate) struct DecodeShape {
    pub(crate) head_dim: usize,
    /// Key-value heads of all sequences.
    pub(crate) total_kv_heads: usize,
    /// Slots that a query attends to, at most.
    pub(crate) longest: usize,
    /// Whether slots are listed.
    pub(crate) listed: bool,
    /// Whether slots have weights.
    pub(crate) weighted: bool,
}

impl Strategy for DecodeStrategy {
    type Shape = DecodeShape;

    const AUTO: Self = Self::Auto;

    #[cfg(feature = "gpu")]
    fn choose(device: &DeviceTraits, shape: &DecodeShape) -> Self {
        // Matrix instructions are faster wherever they serve: 64 µs instead of 128 at
        // 16x32x8x4096 on an H200, 7.5 instead of 9.7 at 1x32x8x2048 (docs/results/kernels.md).
        if Self::TensorCore.obstacle(device, shape).is_some() {
            return Self::Portable;
        }
        let DecodeShape { total_kv_heads, longest, listed, weighted, .. } = *shape;
        let processors = device.processors;
        // One cube of twice the planes does what two parts would.
        if plan::parts(processors, total_kv_heads, longest) <= 2 {
            return Self::TensorCore;
        }
        // Clusters spare the launch that joins parts: 31.3 µs became 29.4 at 8x32x8x3200
        // (docs/results/kernels.md).
        let Some(cubes) = plan::cluster(device, total_kv_heads, longest) else {
            return Self::TensorCore;
        };
        let reads_more = listed || weighted;
        let pays = plan::pays(processors, cubes, total_kv_heads, longest, reads_more);
        if pays { Self::TensorCoreCluster } else { Self::TensorCore }
    }

    #[cfg(feature = "gpu")]
    fn obstacle(self, device: &DeviceTraits, shape: &DecodeShape) -> Option<&'static str> {
        match self {
            Self::Auto | Self::Portable => None,
            Self::TensorCore => device.lacks_products(shape.head_dim),
            Self::TensorCoreCluster => device.lacks_products(shape.head_dim).or_else(|| {
                let cubes = plan::cluster(device, shape.total_kv_heads, shape.longest);
                device.lacks_clusters(cubes.is_some())
            }),
        }
    }
}

#[cfg(all(test, feature = "gpu"))]
mod tests {
    use super::*;

    #[test]
    fn strategies_follow_device_and_shape() {
        let hopper = DeviceTraits::H100;
        let shape = DecodeShape {
            head_dim: 128,
            total_kv_heads: 8,
            longest: 1_200,
            listed: false,
            weighted: false,
        };
        let choose = DecodeStrategy::choose;
        assert_eq!(choose(&hopper, &shape), DecodeStrategy::TensorCoreCluster);
        let older = DeviceTraits { clusters: false, hopper: false, ..hopper };
        assert_eq!(choose(&older, &shape), DecodeStrategy::TensorCore);
        let none = DeviceTraits { multiplies: false, ..older };
        assert_eq!(choose(&none, &shape), DecodeStrategy::Portable);
        // Two parts are one of twice the planes.
        let two = DecodeShape { longest: 300, ..shape };
        assert_eq!(choose(&hopper, &two), DecodeStrategy::TensorCore);
        // Heads that fill the device, ranges too short for a cluster, rows that no product takes.
        let many = DecodeShape { total_kv_heads: 256, ..shape };
        assert_eq!(choose(&hopper, &many), DecodeStrategy::TensorCore);
        let short = DecodeShape { longest: 200, ..shape };
        assert_eq!(choose(&hopper, &short), DecodeStrategy::TensorCore);
        let odd = DecodeShape { head_dim: 80, ..shape };
        assert_eq!(choose(&hopper, &odd), DecodeStrategy::Portable);
        // Whatever is chosen serves.
        for device in [hopper, older, none] {
            for shape in [shape, many, short, odd] {
                assert_eq!(choose(&device, &shape).obstacle(&device, &shape), None);
            }
        }
    }
}
