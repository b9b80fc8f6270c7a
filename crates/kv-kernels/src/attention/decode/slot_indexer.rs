//! Finds the `i`-th slot that a query attends to: in a whole range, in a window, in a list, or in
//! an index set.

use cubecl::prelude::*;

use super::ViewKind;
use super::index_sets::{FIRST, FREED, LOCAL, READ, SINKS};

/// Maps a position among the slots that a query attends to onto a slot of the pool.
#[derive(CubeType, Clone)]
#[expand(derive(Clone))]
pub(crate) struct SlotIndexer {
    /// How many slots the query attends to.
    pub(crate) count: usize,
    /// The range's first slot.
    pub(super) start: usize,
    /// Slots that are attended to at the start of the range.
    sinks: usize,
    /// Tokens that are listed after the sinks, and where their list begins in the view.
    listed: usize,
    list: usize,
    /// By how much a listed token's index exceeds its slot.
    freed: usize,
    /// Slots that are skipped after the sinks and the listed slots.
    gap: usize,
}

#[cube]
impl SlotIndexer {
    /// The indexer of the range `kv_head`, whose row of `view` has `width` numbers.
    ///
    /// # Shapes
    /// `view` `[B, Hkv, width]`: starts of windows, listed slots, or rows of index sets.
    pub(crate) fn new(
        view: &[i32],
        offsets: &[i32],
        lengths: &[i32],
        kv_head: usize,
        width: usize,
        sinks: usize,
        #[comptime] kind: ViewKind,
    ) -> SlotIndexer {
        let length = max(lengths[kv_head], 0i32) as usize;
        let mut indexer = SlotIndexer {
            count: length,
            start: offsets[kv_head] as usize,
            sinks: 0usize,
            listed: 0usize,
            list: 0usize,
            freed: 0usize,
            gap: 0usize,
        };
        if comptime!(kind == ViewKind::Window) {
            indexer.sinks = sinks;
            let kept = min(sinks, length);
            let first = view[kv_head];
            if first > 0i32 && first as usize > kept {
                indexer.gap = min(first as usize, length) - kept;
            }
            indexer.count -= indexer.gap;
        }
        if comptime!(kind == ViewKind::List) {
            indexer.list = kv_head * width;
        }
        if comptime!(kind == ViewKind::Sets) {
            let own = kv_head * width;
            let set = SetView {
                sinks: min(view[own + SINKS] as usize, length),
                first: view[own + FIRST] as usize,
                count: view[own + READ] as usize,
                local: view[own + LOCAL] as usize,
                freed: view[own + FREED] as usize,
            };
            let own = SlotIndexer::of_set(&set, indexer.start, length, own);
            indexer.count = own.count;
            indexer.sinks = own.sinks;
            indexer.listed = own.listed;
            indexer.list = own.list;
            indexer.freed = own.freed;
            indexer.gap = own.gap;
        }
        indexer
    }

    /// The indexer of a step that attends to `set`, in the range that begins at slot `start`. The
    /// row of the table with the set's tokens begins at `own`.
    pub(crate) fn of_set(set: &SetView, start: usize, length: usize, own: usize) -> SlotIndexer {
        // Listed tokens come before the local ones.
        let gap = set.local - (set.sinks + set.count);
        SlotIndexer {
            count: length - gap,
            start,
            sinks: set.sinks,
            listed: set.count,
            list: own + set.first,
            freed: set.freed,
            gap,
        }
    }

    /// The `i`-th slot that the query attends to. Listed numbers outside the pool give `slots`, the
    /// pool's size.
    pub(crate) fn slot(
        &self,
        view: &[i32],
        i: usize,
        slots: usize,
        #[comptime] kind: ViewKind,
    ) -> usize {
        let mut slot = self.start + i;
        if comptime!(kind == ViewKind::Window) {
            slot += select(i < self.sinks, 0usize, self.gap);
        }
        if comptime!(kind == ViewKind::List) {
            let listed = view[self.list + i];
            slot = select(listed >= 0i32 && (listed as usize) < slots, listed as usize, slots);
        }
        if comptime!(kind == ViewKind::Sets) && i >= self.sinks {
            if i < self.sinks + self.listed {
                slot = self.start + view[self.list + i - self.sinks] as usize - self.freed;
            } else {
                slot += self.gap;
            }
        }
        slot
    }
}

/// The slots of a step with an index set: the sinks, the listed tokens, and all slots from the
/// first local one on.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct SetView {
    pub(crate) sinks: usize,
    /// Where the tokens begin in the table's row, and how many they are.
    pub(crate) first: usize,
    pub(crate) count: usize,
    /// The first local slot, counted from the range's first slot.
    pub(crate) local: usize,
    /// By how much a token's index exceeds its slot.
    pub(crate) freed: usize,
}
