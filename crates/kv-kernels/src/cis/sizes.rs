//! Sizes of a call on a device: how many cubes score a range, and how much shared memory kernels
//! take.

use super::bitmask::{BITMASKS, WORD};
use super::radix_pivots::BINS;
use super::shape::CisShape;
use crate::attention::decode::plan::{Kernel, for_choices, room, splits, tensor_core};
use crate::backend::strategy::DeviceTraits;

/// The most slots that a cube scores. Smaller parts let a range that retrieves finish with the
/// others.
pub(super) const PART: usize = 4_096;
/// The fewest slots of a part: below that a cube is not worthwhile.
const SMALLEST_PART: usize = 128;
/// Cubes on a processor, about.
const CUBES_EACH: usize = 4;
/// Units of a plane where matrix instructions attend.
pub(super) const PLANE: usize = 32;
/// The 32-bit numbers of shared memory that attention takes besides its sums.
const BESIDE_ATTENTION: usize = 512;
/// The most slots of a range in which one cube selects in little time.
const LONGEST_FUSED: usize = 8_192;

/// The fewest slots for whose sort keys shared memory is taken.
const SMALLEST_STAGE: usize = 1_024;
/// Units and planes of the widest cube.
const MOST_UNITS: usize = 1_024;
const MOST_PLANES: usize = 128;

/// A call's sizes, and its device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) device: DeviceTraits,
    pub(super) shape: CisShape,
}

/// The plan of the launch that both chooses and attends.
#[derive(Debug, Clone, Copy)]
pub(super) struct FusedPlan {
    /// 32-bit words of a vector of values; and planes of a cube.
    pub(super) words: usize,
    pub(super) planes: usize,
    /// The 32-bit numbers of shared memory for the attention; and the slots for whose sort keys
    /// there is room.
    pub(super) room: usize,
    pub(super) staged: usize,
}

impl Sizes {
    /// The most slots of a range.
    pub(super) fn longest(&self) -> usize {
        self.shape.longest.max(1)
    }

    /// Whether sort keys are made directly of logits.
    pub(super) fn direct(&self) -> bool {
        self.shape.group == 1 && !self.shape.measures
    }

    /// The most planes of a cube of `units` units.
    pub(super) fn planes_of(&self, units: usize) -> usize {
        units.div_ceil(self.device.plane)
    }

    /// Cubes that score a range.
    pub(super) fn splits(&self) -> usize {
        let (processors, total_kv_heads) = (self.device.processors, self.shape.total_kv_heads);
        let most = self.longest().div_ceil(SMALLEST_PART);
        let fill = (processors * CUBES_EACH / total_kv_heads.max(1)).clamp(1, most);
        // Where ranges fill the device, more parts bring nothing.
        let fill = if 2 * total_kv_heads >= processors { 1 } else { fill };
        fill.max(self.longest().div_ceil(PART))
    }

    /// Whether one launch shall choose and attend: where attention takes one cube a range.
    pub(super) fn fuses(&self) -> bool {
        let Some(attended) = self.shape.attends else { return false };
        if self.shape.shares && self.shape.group > 1 {
            return false;
        }
        let kernel = tensor_core(self.shape.head_dim);
        let (parts, _) =
            splits(self.device.processors, kernel, self.shape.total_kv_heads, attended);
        parts == 1 && self.longest() <= LONGEST_FUSED && self.fused().is_some()
    }

    /// The plan of one launch that chooses and attends; `None` where the device or the call does
    /// not allow it.
    pub(super) fn fused(&self) -> Option<FusedPlan> {
        let CisShape { head_dim, total_kv_heads, shares, .. } = self.shape;
        let attended = self.shape.attends?;
        if !self.device.multiplies || !head_dim.is_multiple_of(32) {
            return None;
        }
        let kernel = tensor_core(head_dim);
        let (_, kernel) = splits(self.device.processors, kernel, total_kv_heads, attended);
        // Where steps never share, this launch scores all ranges. Wider cubes then read more at a
        // time.
        for_choices(&self.device, kernel, total_kv_heads, attended)
            .filter(|_| shares)
            .and_then(|plan| self.fits(plan.kernel, Some(plan.room), plan.most, attended))
            .or_else(|| self.fits(kernel, None, room(&self.device, kernel), attended))
    }

    /// The plan of a kernel whose cubes take up to `most` 32-bit numbers of shared memory. The
    /// attention takes `room` of them, or all that the choice leaves.
    fn fits(
        &self,
        kernel: Kernel,
        room: Option<usize>,
        most: usize,
        attended: usize,
    ) -> Option<FusedPlan> {
        let Kernel::TensorCore { words, planes } = kernel else { return None };
        let units = PLANE * planes;
        let staged = self.staged(units);
        let choice = self.choice_room(staged, units);
        let left = most.saturating_sub(choice);
        let room = room.unwrap_or(left);
        let sums = planes * self.shape.group * self.shape.head_dim;
        let fits = room <= left && attended <= room;
        if staged == 0 || !fits || sums.max(room) + choice + BESIDE_ATTENTION > self.room() {
            return None;
        }
        Some(FusedPlan { words, planes, room, staged })
    }

    /// Units of the widest cube. In it, every plane sums the results of all planes.
    pub(super) fn widest(&self) -> usize {
        let most = MOST_PLANES * self.device.plane;
        self.device.units.min(MOST_UNITS).min(most)
    }

    /// The 32-bit numbers that fit in shared memory.
    pub(super) fn room(&self) -> usize {
        self.device.shared_memory / size_of::<u32>()
    }

    /// Slots for whose sort keys shared memory has room, where a cube of `units` units selects; 0
    /// where the longest range does not fit. The number is rounded, since each size compiles a
    /// kernel of its own.
    pub(super) fn staged(&self, units: usize) -> usize {
        let most = self.room().saturating_sub(self.beside(units)) * WORD / (WORD + BITMASKS);
        let power = self.longest().next_power_of_two().max(SMALLEST_STAGE);
        // Rounding a length just above a power of two to the next one would double the memory, and
        // cost a second cube its place on the processor.
        let between = (power / 4 * 3).max(SMALLEST_STAGE);
        let rounded = if self.longest() <= between { between } else { power };
        if self.longest() <= most { rounded.min(most) } else { 0 }
    }

    /// The 32-bit numbers of shared memory that a selection by `units` units takes besides sort
    /// keys and bitmasks.
    pub(super) fn beside(&self, units: usize) -> usize {
        let planes = self.planes_of(units);
        let digits = 2 * BINS + 6 + 2 * planes;
        let sums = if self.direct() { 0 } else { planes * self.shape.group };
        let sets = 3 * self.shape.sets;
        // Other sums over planes, and a margin for compilers.
        digits + sums + sets + 7 * planes + 256
    }

    /// The 32-bit numbers of shared memory of a selection by `units` units, with room for the sort
    /// keys of `staged` slots.
    pub(super) fn choice_room(&self, staged: usize, units: usize) -> usize {
        staged + BITMASKS * staged.div_ceil(WORD) + self.beside(units)
    }
}
