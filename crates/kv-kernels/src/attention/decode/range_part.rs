//! What a cube knows of its head range: its part, and the sequence whose heads decide together.

use cubecl::prelude::*;

use super::blueprint::LogitsSink;
use super::eviction::Eviction;
use super::slot_indexer::SlotIndexer;

/// A sequence whose heads give up a slot together.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Sequence {
    /// Its number, and its first head's.
    pub(super) index: usize,
    pub(super) first: usize,
    /// Importances of a head.
    pub(super) stride: usize,
    /// Slots that all heads have.
    pub(super) length: usize,
    /// Whether a slot is to be given up.
    pub(super) full: bool,
}

#[cube]
impl Sequence {
    /// A head that gives up no slot together with others.
    pub(crate) fn alone(kv_head: usize) -> Sequence {
        Sequence { index: 0usize, first: kv_head, stride: 0usize, length: 0usize, full: false }
    }

    /// That of one of `total_kv_heads` heads, from all heads' lengths and limits.
    pub(super) fn of(
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
            #[comptime]
            if let ComptimeOption::Some(eviction) = eviction {
                sequence.stride = eviction.importances.len() / total_kv_heads;
                let mut length = lengths[sequence.first];
                #[unroll]
                for head in 0..heads {
                    let own = lengths[sequence.first + head];
                    length = min(length, own);
                    // All cubes of the sequence find the same, even of heads that are not equally
                    // long. A name for the comparison keeps `||` from branching: limits are read at
                    // once, not one behind another.
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
    /// Its slots, or listed ones.
    pub(crate) length: i32,
    /// Which of `splits` parts the cube has.
    pub(crate) split: usize,
    pub(crate) splits: usize,
    /// Finds the slots that the range's queries see.
    pub(crate) indexer: SlotIndexer,
    /// The range's sequence, where its heads give up a slot together.
    pub(crate) sequence: Sequence,
}
