//! The bytes of a layer's cache.

use burn::tensor::Tensor;

use super::StateTensor;
use crate::{LayerCache, MemoryReport};

impl LayerCache {
    /// Bytes allocated, in use, for metadata and for policies.
    pub fn memory(&self) -> MemoryReport {
        let row = 2 * self.head_dim() * self.options.dtype.size();
        let weights = self.log_weights().map_or(0, bytes);
        let tracks: usize = self.tracks.values().map(|track| bytes(&track.values)).sum();
        let tensors: usize = self.state.values().map(StateTensor::bytes).sum();
        let states: Vec<_> = self.states.live().map(|state| state.bytes(self)).collect();
        let offsets_and_lengths = 2 * self.layout.head_ranges();
        MemoryReport {
            allocated: self.layout.total() * row,
            in_use: self.layout.used() * row,
            metadata: weights
                + self.range_bytes()
                + (self.slots() + offsets_and_lengths) * size_of::<i32>(),
            policy: tracks + tensors + states.iter().map(|bytes| bytes.device).sum::<usize>(),
            host: states.iter().map(|bytes| bytes.host).sum(),
            scratch: states.iter().map(|bytes| bytes.scratch).sum(),
        }
    }
}

fn bytes<const D: usize>(tensor: &Tensor<D>) -> usize {
    tensor.dims().iter().product::<usize>() * tensor.dtype().size()
}
