//! Which kernel attends, and which evicts.

use crate::DecodeStrategy;
#[cfg(feature = "gpu")]
use crate::attention::decode::plan::{Layout, tensor_core};
use crate::attention::decode::strategy::DecodeShape;
#[cfg(feature = "gpu")]
use crate::backend::strategy::DeviceTraits;
use crate::backend::strategy::Strategy;

/// The kernels of [`evicting_attention`](crate::evicting_attention).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum EvictionStrategy {
    /// The kernels that are expected to be the fastest.
    #[default]
    Auto,
    /// Vector instructions alone, on every CubeCL device. A launch behind joins parts and evicts.
    Portable,
    /// Matrix instructions, in f16 and bf16. A launch behind joins parts and evicts.
    TensorCore,
    /// Matrix instructions, in f16 and bf16. The cube that has a whole head evicts, in the same
    /// launch.
    TensorCoreInPlace,
    /// Matrix instructions, in f16 and bf16. The cubes of a cluster have the parts of a head, join
    /// them, and evict, in the same launch.
    TensorCoreCluster,
}

/// What the choice of kernels asks of a call.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "a CPU has no choice"))]
pub(crate) struct EvictionShape {
    pub(crate) attention: DecodeShape,
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    /// Whether no sinks or recents are kept, no importances are equal, and none are returned.
    pub(crate) alone: bool,
}

impl EvictionStrategy {
    /// The attention's kernel.
    pub(super) fn attention(self) -> DecodeStrategy {
        match self {
            Self::Auto => DecodeStrategy::Auto,
            Self::Portable => DecodeStrategy::Portable,
            Self::TensorCore | Self::TensorCoreInPlace => DecodeStrategy::TensorCore,
            Self::TensorCoreCluster => DecodeStrategy::TensorCoreCluster,
        }
    }

    /// Whether the attention's launch evicts.
    #[cfg(feature = "gpu")]
    pub(super) fn evicts_in_launch(self) -> bool {
        matches!(self, Self::TensorCoreInPlace | Self::TensorCoreCluster)
    }
}

impl Strategy for EvictionStrategy {
    type Shape = EvictionShape;

    const AUTO: Self = Self::Auto;

    #[cfg(feature = "gpu")]
    fn choose(device: &DeviceTraits, shape: &EvictionShape) -> Self {
        // Matrix instructions are faster wherever they serve, and so is the launch that evicts in
        // place, though clusters leave processors idle: a launch behind reads all logits once more.
        // 15.9 µs became 12.4 at 1x32x8x3200 (docs/results/kernels.md).
        let whole = layout(device, shape).splits == 1;
        let in_launch = if whole { Self::TensorCoreInPlace } else { Self::TensorCoreCluster };
        let serves = |strategy: &Self| strategy.obstacle(device, shape).is_none();
        [in_launch, Self::TensorCore].into_iter().find(serves).unwrap_or(Self::Portable)
    }

    #[cfg(feature = "gpu")]
    fn obstacle(self, device: &DeviceTraits, shape: &EvictionShape) -> Option<&'static str> {
        let EvictionShape { attention, group, alone } = *shape;
        let DecodeShape { head_dim, total_kv_heads, longest, .. } = attention;
        let obstacle = self.attention().obstacle(device, &attention);
        if obstacle.is_some() || !self.evicts_in_launch() {
            return obstacle;
        }
        if !alone {
            return Some(
                "a launch behind keeps sinks and recents, compares levels, returns importances",
            );
        }
        let layout = match self {
            Self::TensorCoreCluster => {
                Layout::clustered(device, tensor_core(head_dim), total_kv_heads, longest)
            }
            _ => Some(layout(device, shape)).filter(|layout| layout.splits == 1),
        };
        match layout {
            None => Some("several cubes share a head"),
            Some(layout) => (!layout.holds_logits(group, head_dim, longest))
                .then_some("shared memory has no room for the logits of a head"),
        }
    }
}

/// The layout of the attention by matrix instructions without clusters.
#[cfg(feature = "gpu")]
fn layout(device: &DeviceTraits, shape: &EvictionShape) -> Layout {
    let DecodeShape { head_dim, total_kv_heads, longest, .. } = shape.attention;
    Layout::of(device, tensor_core(head_dim), total_kv_heads, longest)
}

#[cfg(all(test, feature = "gpu"))]
mod tests {
    use super::*;

    #[test]
    fn strategies_follow_device_and_shape() {
        let hopper = DeviceTraits::H100;
        let attention = DecodeShape {
            head_dim: 128,
            total_kv_heads: 8,
            longest: 3_200,
            listed: false,
            weighted: false,
        };
        let shape = EvictionShape { attention, group: 4, alone: true };
        let of = |total_kv_heads, longest| EvictionShape {
            attention: DecodeShape { total_kv_heads, longest, ..attention },
            ..shape
        };
        let choose = EvictionStrategy::choose;
        assert_eq!(choose(&hopper, &shape), EvictionStrategy::TensorCoreCluster);
        // Two parts are one of twice the planes, and heads may fill the device.
        for shape in [of(8, 300), of(256, 3_200)] {
            assert_eq!(choose(&hopper, &shape), EvictionStrategy::TensorCoreInPlace);
        }
        // Clusters serve where attention alone would leave parts to a launch behind.
        let long = of(8, 16_384);
        assert_eq!(DecodeStrategy::choose(&hopper, &long.attention), DecodeStrategy::TensorCore);
        assert_eq!(choose(&hopper, &long), EvictionStrategy::TensorCoreCluster);
        // No clusters, more logits than shared memory holds, and more than a slot wanted.
        let older = DeviceTraits { clusters: false, hopper: false, ..hopper };
        assert_eq!(choose(&older, &shape), EvictionStrategy::TensorCore);
        for shape in [of(8, 200_000), of(256, 30_000), EvictionShape { alone: false, ..shape }] {
            assert_eq!(choose(&hopper, &shape), EvictionStrategy::TensorCore);
        }
        let none = DeviceTraits { multiplies: false, ..older };
        assert_eq!(choose(&none, &shape), EvictionStrategy::Portable);
        // Whatever is chosen serves.
        for device in [hopper, older, none] {
            for shape in [shape, long, of(8, 300), of(256, 3_200), of(256, 30_000)] {
                assert_eq!(choose(&device, &shape).obstacle(&device, &shape), None);
            }
        }
    }
}
