//! Which kernel attends.

#[cfg(feature = "gpu")]
use burn_cubecl::tensor::CubeTensor;

#[cfg(feature = "gpu")]
use super::plan::Plan;
use super::shape::SketchShape;
#[cfg(feature = "gpu")]
use crate::attention::decode::blueprint::KvSplit;
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
    /// Matrix instructions, in f16 and bf16. Parts of a head are joined by a launch behind.
    TensorCore,
    /// Matrix instructions, in f16 and bf16. The cubes of a cluster have the parts of a head, and
    /// join them.
    TensorCoreCluster,
}

impl Strategy for SketchStrategy {
    type Shape = SketchShape;

    const AUTO: Self = Self::Auto;

    #[cfg(feature = "gpu")]
    fn choose(device: &DeviceTraits, shape: &SketchShape) -> Self {
        // For one query head, a plane's products of whole tiles are more work than a team's of
        // rows: 137 µs against 129 at batch 8 and 4,096 tokens (docs/results/kernels.md).
        if shape.group == 1 || device.lacks_products(shape.head_dim).is_some() {
            return Self::Portable;
        }
        // A launch behind costs more than the cubes of a cluster do, which may be too few.
        match Plan::tiles(device, shape, |_| true) {
            None => Self::Portable,
            Some(Plan { parts: KvSplit::Cluster(_), .. }) => Self::TensorCoreCluster,
            Some(_) => Self::TensorCore,
        }
    }

    #[cfg(feature = "gpu")]
    fn obstacle(self, device: &DeviceTraits, shape: &SketchShape) -> Option<&'static str> {
        if matches!(self, Self::Auto | Self::Portable) {
            return None;
        }
        if let Some(why) = device.lacks_products(shape.head_dim) {
            return Some(why);
        }
        if Plan::tiles(device, shape, |_| true).is_none() {
            return Some("shared memory has no room for the sums of a cube");
        }
        match self.tiles(device, shape) {
            Some(_) => None,
            None => device.lacks_clusters(false),
        }
    }
}

#[cfg(feature = "gpu")]
impl SketchStrategy {
    /// How a call is laid out on the device of its query.
    pub(super) fn plan(self, query: &CubeTensor, shape: &SketchShape) -> Plan {
        let device = DeviceTraits::of(&query.client, query.dtype);
        let tiles = self.or_chosen(&device, shape).tiles(&device, shape);
        tiles.unwrap_or_else(|| Plan::plain(query, shape))
    }

    /// The best layout of this strategy's kernel for matrix instructions, if it has one.
    fn tiles(self, device: &DeviceTraits, shape: &SketchShape) -> Option<Plan> {
        let clusters = match self {
            Self::Auto | Self::Portable => return None,
            Self::TensorCore => false,
            Self::TensorCoreCluster => true,
        };
        Plan::tiles(device, shape, |parts| matches!(parts, KvSplit::Cluster(_)) == clusters)
    }
}

#[cfg(all(test, feature = "gpu"))]
mod tests {
    use super::*;

    #[test]
    fn strategies_follow_device_and_shape() {
        let hopper = DeviceTraits::H100;
        let shape = SketchShape {
            head_dim: 128,
            size: 2,
            total_kv_heads: 8,
            group: 4,
            entries: 39,
            buckets: 3,
            longest: 1_000,
        };
        let choose = SketchStrategy::choose;
        assert_eq!(choose(&hopper, &shape), SketchStrategy::TensorCoreCluster);
        let older = DeviceTraits { clusters: false, hopper: false, ..hopper };
        assert_eq!(choose(&older, &shape), SketchStrategy::TensorCore);
        let none = DeviceTraits { multiplies: false, ..older };
        assert_eq!(choose(&none, &shape), SketchStrategy::Portable);
        // Heads that fill the device, one query head, and rows that no product takes.
        let many = SketchShape { total_kv_heads: 264, ..shape };
        assert_eq!(choose(&hopper, &many), SketchStrategy::TensorCore);
        for shape in [SketchShape { group: 1, ..shape }, SketchShape { head_dim: 80, ..shape }] {
            assert_eq!(choose(&hopper, &shape), SketchStrategy::Portable);
        }
        for device in [hopper, older, none] {
            for longest in [1, 100, 1_000, 2_000, 30_000] {
                for total_kv_heads in [1, 8, 20, 60, 264] {
                    let shape = SketchShape { longest, total_kv_heads, ..shape };
                    // Whatever is chosen serves, and its layout is the best of all.
                    let chosen = choose(&device, &shape);
                    assert_eq!(chosen.obstacle(&device, &shape), None);
                    if let Some(own) = chosen.tiles(&device, &shape) {
                        let best = Plan::tiles(&device, &shape, |_| true).unwrap();
                        let of = |plan: Plan| (plan.splits, plan.parts, plan.staged);
                        assert_eq!(of(own), of(best), "{shape:?}");
                    }
                }
            }
        }
    }
}
