//! Shared memory: what kernels take, and what there is room for.

use super::bitmask::{BITMASKS, WORD};
use super::call::Call;
use super::radix_pivots::BINS;
use crate::backend::client::planes_of;

/// The fewest slots for whose scores shared memory is taken.
const SMALLEST_STAGE: usize = 1_024;
/// Units and planes of the widest cube.
const MOST_UNITS: usize = 1_024;
const MOST_PLANES: usize = 128;

impl Call {
    /// Units of the widest cube, in which every plane adds up what all have found.
    pub(super) fn widest(&self) -> usize {
        let hardware = &self.query.client.properties().hardware;
        let most = MOST_PLANES * (hardware.plane_size_min as usize).max(1);
        (hardware.max_units_per_cube as usize).min(MOST_UNITS).min(most)
    }

    /// Numbers that shared memory has room for.
    pub(super) fn room(&self) -> usize {
        let hardware = &self.query.client.properties().hardware;
        hardware.max_shared_memory_size / size_of::<u32>()
    }

    /// Slots for whose scores shared memory has room, where a cube of `units` selects: one of few
    /// sizes, as each is a kernel of its own; 0 where the longest range does not fit.
    pub(super) fn staged(&self, units: usize) -> usize {
        let most = self.room().saturating_sub(self.beside(units)) * WORD / (WORD + BITMASKS);
        let power = self.longest().next_power_of_two().max(SMALLEST_STAGE);
        // A little more than a power of two would take twice as much, and the place of a cube
        // beside.
        let between = (power / 4 * 3).max(SMALLEST_STAGE);
        let rounded = if self.longest() <= between { between } else { power };
        if self.longest() <= most { rounded.min(most) } else { 0 }
    }

    /// Numbers of shared memory that a selection by `units` units takes beside scores and bitmasks.
    pub(super) fn beside(&self, units: usize) -> usize {
        let planes = planes_of(&self.query.client, units);
        let digits = 2 * BINS + 6 + 2 * planes;
        let sums = if self.direct() { 0 } else { planes * self.group };
        let sets = 3 * self.config.sets;
        // Other sums over planes, and what compilers add.
        digits + sums + sets + 7 * planes + 256
    }

    /// Numbers of shared memory that a selection by `units` units takes, with room for the scores
    /// of `staged` slots.
    pub(super) fn choice_room(&self, staged: usize, units: usize) -> usize {
        staged + BITMASKS * staged.div_ceil(WORD) + self.beside(units)
    }
}
