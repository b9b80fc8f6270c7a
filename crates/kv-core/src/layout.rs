use std::ops::Range;

use burn::tensor::Device;
use kv_kernels::SlotRanges;

use crate::tensors::ints;

/// Where each (sequence, key-value head) has its slots in a pool: the host's exact mirror of the
/// device's offsets and lengths (every operation changes lengths by amounts that the host knows).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotLayout {
    kv_heads: usize,
    offsets: Vec<usize>,
    capacities: Vec<usize>,
    lengths: Vec<usize>,
}

impl SlotLayout {
    /// Empty ranges of the given capacities, `[B * Hkv]`, one behind the other.
    pub fn new(kv_heads: usize, capacities: Vec<usize>) -> Self {
        let offsets = capacities
            .iter()
            .scan(0, |end, capacity| {
                let start = *end;
                *end += capacity;
                Some(start)
            })
            .collect();
        Self { kv_heads, offsets, lengths: vec![0; capacities.len()], capacities }
    }

    /// `B * Hkv`.
    pub fn pairs(&self) -> usize {
        self.capacities.len()
    }

    /// `B`.
    pub fn batch(&self) -> usize {
        self.pairs() / self.kv_heads
    }

    /// `Hkv`.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// First slot of each pair.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// Slots reserved for each pair.
    pub fn capacities(&self) -> &[usize] {
        &self.capacities
    }

    /// Live slots of each pair.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    pub(crate) fn lengths_mut(&mut self) -> &mut [usize] {
        &mut self.lengths
    }

    /// Live slots of a pair, as indices into the pool.
    pub fn live(&self, pair: usize) -> Range<usize> {
        self.offsets[pair]..self.offsets[pair] + self.lengths[pair]
    }

    /// Live slots of all pairs, as indices into the pool, ascending.
    pub fn live_slots(&self) -> impl Iterator<Item = usize> {
        (0..self.pairs()).flat_map(|pair| self.live(pair))
    }

    /// Slots of the pool.
    pub fn total(&self) -> usize {
        self.capacities.iter().sum()
    }

    /// Live slots of the pool.
    pub fn used(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Whether every pair has the same capacity, so that the pool reads as `[B, Hkv, C, D]`.
    pub fn uniform_capacity(&self) -> Option<usize> {
        let first = *self.capacities.first()?;
        self.capacities.iter().all(|&capacity| capacity == first).then_some(first)
    }

    /// Whether every pair has the same length.
    pub fn uniform_length(&self) -> Option<usize> {
        let first = *self.lengths.first()?;
        self.lengths.iter().all(|&length| length == first).then_some(first)
    }

    /// The ranges as device tensors `[B, Hkv]`.
    pub(crate) fn to_device(&self, device: &Device) -> SlotRanges {
        let shape = [self.batch(), self.kv_heads];
        let upload = |values: &[usize]| {
            ints(values.iter().map(|&value| value as i32).collect(), shape, device)
        };
        SlotRanges { offsets: upload(&self.offsets), lengths: upload(&self.lengths) }
    }
}
