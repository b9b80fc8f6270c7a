//! The ops on shared lists in plain loops: the CPU path, and the oracle of the kernels' tests.

use super::HEADER;
use crate::components::sentinels::NO_SLOT;
use crate::select::scored_rows::BUDGETS;

/// The tokens of rows that chose anew.
pub(crate) struct NewLists<'a> {
    pub(crate) indices: &'a [i32],
    pub(crate) found: &'a [i32],
    pub(crate) wanted: &'a [i32],
    pub(crate) budgets: &'a [i32],
    /// `[B, Hkv]`
    pub(crate) lengths: &'a [i32],
}

impl NewLists<'_> {
    /// Stores the tokens in `lists` `[R, width]`.
    pub(crate) fn keep(&self, lists: &mut [i32]) {
        let rows = self.found.len();
        let (most, group) = (self.indices.len() / rows, rows / self.lengths.len());
        for (row, list) in lists.chunks_exact_mut(HEADER + most).enumerate() {
            if self.wanted[row] <= 0 {
                continue;
            }
            let length = self.lengths[row / group];
            let [sinks, recents] = [1, 2].map(|at| self.budgets[row * BUDGETS + at]);
            list[0] = self.found[row];
            list[1] = (length - recents).max(sinks.min(length));
            list[2] += 1;
            list[HEADER..].copy_from_slice(&self.indices[row * most..][..most]);
        }
    }
}

/// Slots `[R, width]`, and the number of each row's slots `[R]`. `list` is the number of integers
/// of a list in the table.
pub(crate) fn slots(
    (table, list): (&[i32], usize),
    (sources, columns): (&[i32], usize),
    budgets: &[i32],
    [offsets, lengths]: [&[i32]; 2],
    heads: usize,
    width: usize,
) -> (Vec<i32>, Vec<i32>) {
    let rows = budgets.len() / BUDGETS;
    let group = rows / offsets.len();
    let (mut slots, mut counts) = (Vec::new(), Vec::new());
    for row in 0..rows {
        let source = &sources[row * columns..][..columns];
        let layer = source.get(1).map_or(0, |layer| *layer as usize);
        let at = layer * rows + row / heads * heads + source[0] as usize;
        let list = &table[at * list..][..list];
        let (offset, length) = (offsets[row / group], lengths[row / group]);
        let own = budgets[row * BUDGETS + 1];
        let sinks = own.min(length);
        let chosen = list[HEADER..][..list[0].max(0) as usize].iter().map(|at| own + at);
        let recents = list[1].max(sinks)..length;
        let all = (0..sinks).chain(chosen).chain(recents).map(|slot| offset + slot);
        let before = slots.len();
        slots.extend(all.take(width));
        counts.push((slots.len() - before) as i32);
        slots.resize(before + width, NO_SLOT);
    }
    (slots, counts)
}
