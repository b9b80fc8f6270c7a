//! Which slot is the `i`-th that a query attends to: of all slots of a range, of a window, of a
//! list, or of an index set.

use cubecl::prelude::*;

use super::ViewKind;
use super::index_sets::{FIRST, FREED, LOCAL, READ, SINKS};

/// Which of a range's slots a query attends to: finds the slot of the `i`-th of them.
#[derive(CubeType, Clone)]
#[expand(derive(Clone))]
pub(crate) struct SlotIndexer {
    /// How many slots the query attends to.
    pub(crate) count: usize,
    /// The range's first slot.
    pub(super) start: usize,
    /// How many slots are read from there on before those that `listed` and `gap` are for.
    sinks: usize,
    /// How many slots are listed behind the sinks, and where in the view.
    listed: usize,
    list: usize,
    /// What a listed token's index is ahead of its slot.
    freed: usize,
    /// How many slots are skipped before the rest.
    gap: usize,
}

#[cube]
impl SlotIndexer {
    /// The slots of the range `kv_head`, given the row of `width` numbers that `view` has for it.
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

    /// The slots that a step reads of the range at slot `start`, as `set` says, whose tokens are in
    /// the row at `own` of the table.
    pub(crate) fn of_set(set: &SetView, start: usize, length: usize, own: usize) -> SlotIndexer {
        // Listed tokens are before the local ones.
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

    /// The `i`-th slot that the query attends to; `slots`, the pool's size, for listed numbers that
    /// are no slot of the pool.
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

/// What a step reads: sinks, tokens listed in the table, and all slots from a local one on.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct SetView {
    pub(crate) sinks: usize,
    /// Where in the table's row the tokens are, and how many.
    pub(crate) first: usize,
    pub(crate) count: usize,
    /// The first local slot, counted from the range's first.
    pub(crate) local: usize,
    /// What a token's index is ahead of its slot.
    pub(crate) freed: usize,
}
