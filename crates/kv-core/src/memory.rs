//! The bytes of a cache.

use std::ops::Add;

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

/// Bytes of a cache, by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Keys and values allocated: live slots and room.
    pub allocated: usize,
    /// Keys and values of live slots.
    pub in_use: usize,
    /// Positions, weights, offsets and lengths.
    pub metadata: usize,
    /// Tracks, state tensors and states of policies.
    pub policy: usize,
    /// Keys and values that policies keep in host memory.
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
