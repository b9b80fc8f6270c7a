//! Shared memory: what kernels take, and what there is room for.

use super::call::Call;
use super::marks::{MARKS, WORD};
use super::radix::{BINS, PLANES};

/// The fewest slots for whose scores shared memory is taken.
const SMALLEST_STAGE: usize = 1_024;

impl Call {
    /// Numbers that shared memory has room for.
    pub(super) fn room(&self) -> usize {
        let hardware = &self.query.client.properties().hardware;
        hardware.max_shared_memory_size / size_of::<u32>()
    }

    /// Slots for whose scores shared memory has room, where a cube chooses: one of few sizes, as each
    /// is a kernel of its own; 0 where the longest range does not fit.
    pub(super) fn staged(&self) -> usize {
        let most = self.room().saturating_sub(self.beside()) * WORD / (WORD + MARKS);
        let power = self.longest().next_power_of_two().max(SMALLEST_STAGE);
        // A little more than a power of two would take twice as much, and the place of a cube beside.
        let between = (power / 4 * 3).max(SMALLEST_STAGE);
        let rounded = if self.longest() <= between { between } else { power };
        if self.longest() <= most { rounded.min(most) } else { 0 }
    }

    /// Numbers of shared memory that a choice takes beside scores and marks.
    pub(super) fn beside(&self) -> usize {
        let digits = 2 * BINS + 6 + 2 * PLANES;
        let sums = if self.direct() { 0 } else { PLANES * self.group };
        let certificate = if self.config.options.certified { PLANES * (self.group + 1) } else { 0 };
        let sets = 3 * self.config.sets;
        // Other sums over planes, and what compilers add.
        digits + sums + certificate + sets + 7 * PLANES + 256
    }

    /// Numbers of shared memory of a choice with room for the scores of so many slots.
    pub(super) fn choice_room(&self, staged: usize) -> usize {
        staged + MARKS * staged.div_ceil(WORD) + self.beside()
    }
}
