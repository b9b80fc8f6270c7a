use burn::tensor::{DType, Device};

/// How a cache stores its slots.
#[derive(Debug, Clone)]
pub struct CacheOptions {
    /// The device of the cache's tensors.
    pub device: Device,
    /// Keys' and values' dtype: f32, f16 or bf16.
    pub dtype: DType,
    /// Whether slots carry weights; without, all weights are 1 and cost nothing.
    pub weighted: bool,
    /// Whether a full head makes the pool grow instead of failing. Growing allocates a new pool.
    pub growable: bool,
}

impl CacheOptions {
    /// Unweighted slots of a fixed capacity.
    pub fn new(device: &Device, dtype: DType) -> Self {
        Self { device: device.clone(), dtype, weighted: false, growable: false }
    }
}

/// Free slots to reserve beyond what is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// This many free slots in every head.
    Extra(usize),
    /// Up to this many slots in every head, kept ones included (never less than what is kept).
    Total(usize),
    /// The most slots that `new_tokens` decode steps can fill. The policy evicts to `limit` slots,
    /// or to the number that a head keeps of the prompt if that is larger. Between evictions a head
    /// has up to `over` slots more.
    Limited {
        /// Slots after an eviction.
        limit: usize,
        /// Slots beyond the limit before an eviction.
        over: usize,
        /// Decode steps to come.
        new_tokens: usize,
    },
}

impl Room {
    /// Capacity of a head that keeps `kept` tokens.
    pub(super) fn capacity(self, kept: usize) -> usize {
        match self {
            Self::Extra(extra) => kept + extra,
            Self::Total(total) => total.max(kept),
            // One slot more than the steps: a step appends before it evicts.
            Self::Limited { limit, over, new_tokens } => {
                (limit.max(kept).saturating_add(over)).min(kept + new_tokens + 1)
            }
        }
    }
}
