//! The part of a head range that a cube takes, and the sequence whose heads evict one common slot.

use cubecl::prelude::*;

use super::blueprint::LogitsSink;
use super::eviction::Eviction;
use super::slot_indexer::SlotIndexer;

/// A sequence whose heads evict one common slot.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Sequence {
    /// The sequence's number, and the number of its first head.
    pub(super) index: usize,
    pub(super) first: usize,
    /// The first slot of the first head, which has the records of all heads where steps remember.
    pub(super) start: usize,
    /// Importances that a head has room for.
    pub(super) stride: usize,
    /// Slots that every head of the sequence has.
    pub(super) length: usize,
    /// Whether a slot is to be evicted.
    pub(super) full: bool,
}

#[cube]
impl Sequence {
    /// The value for a head that decides alone.
    pub(crate) fn alone(kv_head: usize) -> Sequence {
        Sequence {
            index: 0usize,
            first: kv_head,
            start: 0usize,
            stride: 0usize,
            length: 0usize,
            full: false,
        }
    }

    /// The sequence of head `kv_head`, one of `total_kv_heads`, from all heads' ranges and limits.
    pub(super) fn of(
        offsets: &[i32],
        lengths: &[i32],
        eviction: &ComptimeOption<Eviction>,
        kv_head: usize,
        total_kv_heads: usize,
        #[comptime] logits: LogitsSink,
    ) -> Sequence {
        let heads = comptime!(logits.together());
        let mut sequence = Sequence::alone(kv_head);
        if comptime!(heads > 0) {
            sequence.index = kv_head / heads;
            sequence.first = kv_head / heads * heads;
            if comptime!(logits.remembers()) {
                sequence.start = offsets[sequence.first] as usize;
            }
            #[comptime]
            if let ComptimeOption::Some(eviction) = eviction {
                sequence.stride = eviction.importances.len() / total_kv_heads;
                let mut length = lengths[sequence.first];
                #[unroll]
                for head in 0..heads {
                    let own = lengths[sequence.first + head];
                    length = min(length, own);
                    // All cubes of a sequence compute equal results, even where its heads differ in
                    // length. The comparison has a name of its own to keep `||` from branching:
                    // limits are then read at once, not one after another.
                    let full = own >= eviction.limits[sequence.first + head];
                    sequence.full = sequence.full || full;
                }
                sequence.length = max(length, 0i32) as usize;
            }
        }
        sequence
    }
}

/// A cube's part of a head range.
#[derive(CubeType)]
pub(crate) struct RangePart {
    /// The range, counted over all sequences' key-value heads.
    pub(crate) kv_head: usize,
    /// Live slots of the range, or slots of its list.
    pub(crate) length: i32,
    /// The number of this cube's part, of `splits` parts.
    pub(crate) split: usize,
    pub(crate) splits: usize,
    /// Finds the slots that the range's queries attend to.
    pub(crate) indexer: SlotIndexer,
    /// The range's sequence, where its heads evict one common slot.
    pub(crate) sequence: Sequence,
}
