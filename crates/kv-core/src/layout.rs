use std::ops::Range;

use burn::tensor::Device;
use kv_kernels::SlotRanges;

use crate::tensors::ints;

/// Where each head range lies in a pool. It is the host's exact copy of the offsets and lengths on
/// the device: the host knows by how much each operation changes a length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotLayout {
    kv_heads: usize,
    offsets: Vec<usize>,
    capacities: Vec<usize>,
    lengths: Vec<usize>,
    /// Where head ranges come and go within one pool.
    pub(crate) arena: Option<ArenaLayout>,
}

/// How head ranges share the pool of an arena ([`crate::LayerCache::arena`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ArenaLayout {
    /// The slots of the pool.
    pub(crate) slots: usize,
    /// The most slots that a head range may have: grids of recorded steps follow from it.
    pub(crate) most: usize,
    /// The block of each sequence; `None` while its row is idle.
    pub(crate) blocks: Vec<Option<Range<usize>>>,
}

impl SlotLayout {
    /// Empty head ranges of the given capacities, `[B * Hkv]`, one behind the other.
    pub fn new(kv_heads: usize, capacities: Vec<usize>) -> Self {
        let offsets = capacities
            .iter()
            .scan(0, |end, capacity| {
                let start = *end;
                *end += capacity;
                Some(start)
            })
            .collect();
        let lengths = vec![0; capacities.len()];
        Self { kv_heads, offsets, lengths, capacities, arena: None }
    }

    /// Sets where a head range lies.
    pub(crate) fn set_range(
        &mut self,
        range: usize,
        offset: usize,
        capacity: usize,
        length: usize,
    ) {
        self.offsets[range] = offset;
        self.capacities[range] = capacity;
        self.lengths[range] = length;
    }

    /// The number of head ranges, `B * Hkv`.
    pub fn head_ranges(&self) -> usize {
        self.capacities.len()
    }

    /// The sequences of the batch, `B`.
    pub fn batch(&self) -> usize {
        self.head_ranges() / self.kv_heads
    }

    /// The key-value heads of a sequence, `Hkv`.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// The first slot of each head range, `[B * Hkv]`.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// The slots reserved for each head range, `[B * Hkv]`.
    pub fn capacities(&self) -> &[usize] {
        &self.capacities
    }

    /// The largest capacity of a head range, or the largest that one may have; 0 without any.
    pub fn most_capacity(&self) -> usize {
        if let Some(arena) = &self.arena {
            return arena.most;
        }
        self.capacities.iter().max().copied().unwrap_or_default()
    }

    /// The number of live slots of each head range, `[B * Hkv]`.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    pub(crate) fn lengths_mut(&mut self) -> &mut [usize] {
        &mut self.lengths
    }

    /// The live slots of a head range, as indices into the pool.
    pub fn live(&self, range: usize) -> Range<usize> {
        self.offsets[range]..self.offsets[range] + self.lengths[range]
    }

    /// The live slots of all head ranges, as indices into the pool, ascending.
    pub fn live_slots(&self) -> impl Iterator<Item = usize> {
        (0..self.head_ranges()).flat_map(|range| self.live(range))
    }

    /// The number of slots of the pool.
    pub fn total(&self) -> usize {
        if let Some(arena) = &self.arena {
            return arena.slots;
        }
        self.capacities.iter().sum()
    }

    /// The number of live slots of the pool.
    pub fn used(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// The capacity of all head ranges where it is one, so that the pool reads as
    /// `[B, Hkv, C, D]`.
    pub fn uniform_capacity(&self) -> Option<usize> {
        let first = *self.capacities.first().filter(|_| self.arena.is_none())?;
        self.capacities.iter().all(|&capacity| capacity == first).then_some(first)
    }

    /// The length of all head ranges where it is one.
    pub fn uniform_length(&self) -> Option<usize> {
        let first = *self.lengths.first()?;
        self.lengths.iter().all(|&length| length == first).then_some(first)
    }

    /// The offsets and lengths as device tensors, `[B, Hkv]`.
    pub(crate) fn to_device(&self, device: &Device) -> SlotRanges {
        let shape = [self.batch(), self.kv_heads];
        let upload = |values: &[usize]| {
            ints(values.iter().map(|&value| value as i32).collect(), shape, device)
        };
        SlotRanges { offsets: upload(&self.offsets), lengths: upload(&self.lengths) }
    }
}
