//! What a cache takes, in bytes.

use std::ops::Add;

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::LayerCache;
use crate::layer::StateTensor;

/// Bytes of a cache, by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Keys and values allocated: live slots and room.
    pub allocated: usize,
    /// Keys and values of live slots.
    pub in_use: usize,
    /// Positions, weights, offsets and lengths.
    pub metadata: usize,
    /// What policies keep beside the slots.
    pub policy: usize,
    /// Keys and values in host memory, of which the device has a part.
    #[serde(default)]
    pub host: usize,
    /// Working memory that is not part of the cache: the prompt's keys and values of one layer
    /// during prefill, or of all layers under policies that compress them together; the rebuilt
    /// cache of one layer under policies that rebuild it.
    pub scratch: usize,
}

impl MemoryReport {
    /// Keys and values allocated but free: room to decode.
    pub fn room(&self) -> usize {
        self.allocated - self.in_use
    }

    /// Everything on the device.
    pub fn total(&self) -> usize {
        self.allocated + self.metadata + self.policy + self.scratch
    }

    /// Bytes of keys and values that a full cache needs for `tokens` tokens in all (over sequences
    /// of a batch) in `layers` layers.
    pub fn full(
        tokens: usize,
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
        dtype: DType,
    ) -> usize {
        2 * tokens * layers * kv_heads * head_dim * dtype.size()
    }

    pub(crate) fn of_layer(cache: &LayerCache) -> Self {
        let row = 2 * cache.head_dim() * cache.options().dtype.size();
        let slots = cache.slots();
        let weights = cache.log_weights().map_or(0, bytes);
        let tracks: usize = cache.tracks.values().map(|track| bytes(&track.values)).sum();
        let state: usize = cache.state.values().map(StateTensor::bytes).sum();
        let states: Vec<_> = cache.states.live().map(|state| state.bytes(cache)).collect();
        // Offsets and lengths.
        let ranges = 2;
        Self {
            allocated: cache.layout().total() * row,
            in_use: cache.layout().used() * row,
            metadata: slots * size_of::<i32>()
                + weights
                + ranges * cache.layout().pairs() * size_of::<i32>(),
            policy: tracks + state + states.iter().map(|bytes| bytes.device).sum::<usize>(),
            host: states.iter().map(|bytes| bytes.host).sum(),
            scratch: states.iter().map(|bytes| bytes.scratch).sum(),
        }
    }
}

impl Add for MemoryReport {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            allocated: self.allocated + other.allocated,
            in_use: self.in_use + other.in_use,
            metadata: self.metadata + other.metadata,
            policy: self.policy + other.policy,
            host: self.host + other.host,
            // Scratch is shared by all layers.
            scratch: self.scratch.max(other.scratch),
        }
    }
}

impl std::iter::Sum for MemoryReport {
    fn sum<I: Iterator<Item = Self>>(reports: I) -> Self {
        reports.fold(Self::default(), Add::add)
    }
}

fn bytes<const D: usize>(tensor: &Tensor<D>) -> usize {
    tensor.dims().iter().product::<usize>() * tensor.dtype().size()
}
