use burn::tensor::{Int, Tensor};

/// Which slots of a pool belong to each (sequence, key-value head): device tensors, so that a
/// decode step can run (and be captured as a graph) without the host.
#[derive(Debug, Clone)]
pub struct SlotRanges {
    /// First slot, `[B, Hkv]`, 32-bit integers.
    pub offsets: Tensor<2, Int>,
    /// Live slots from there on, `[B, Hkv]`, 32-bit integers.
    pub lengths: Tensor<2, Int>,
}
