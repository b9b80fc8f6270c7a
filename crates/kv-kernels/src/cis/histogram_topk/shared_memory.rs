//! Which calls are selected by histograms, and how much shared memory the kernels take.

use super::{BINS, FEWEST_CANDIDATES, FINER, MOST_CANDIDATES, PART_WORDS};
use crate::cis::bitmask::{BITMASKS, WORD};
use crate::cis::sizes::Sizes;

/// Slots of a range above which several cubes share its selection: with one query head a group,
/// where sort keys are made of logits; and with more, where the scores of a group are joined first.
const LONGEST: usize = 8_192;
const LONGEST_OF_GROUPS: usize = 2_048;
/// The bitmask of a long range has a multiple of this number of words.
const COARSEST: usize = 256;
/// The most ranges of a call that is selected by histograms, since each cube lists the ranges that
/// retrieve; and the fewest that shared memory is sized for.
const MOST_RANGES: usize = 4_096;
const FEWEST_RANGES: usize = 256;

impl Sizes {
    /// Whether ranges are long enough for several cubes to share a selection.
    pub(in crate::cis) fn is_long(&self) -> bool {
        self.longest() > if self.direct() { LONGEST } else { LONGEST_OF_GROUPS }
    }

    /// Whether shared memory has room for bins and for the bitmasks of a range.
    pub(in crate::cis) fn has_room_for_histogram(&self) -> bool {
        let counting = BINS + 2 * PART_WORDS + self.listed() + self.summing(true);
        self.shape.total_kv_heads <= MOST_RANGES
            && counting.max(self.finishing(FEWEST_CANDIDATES)) <= self.room()
    }

    /// Words of the bitmask of the longest range, rounded up, since each size compiles a kernel of
    /// its own.
    pub(super) fn words(&self) -> usize {
        let words = self.longest().div_ceil(WORD);
        words.next_power_of_two().min(words.next_multiple_of(COARSEST))
    }

    /// Ranges that a cube has room to list, rounded up, since each size compiles a kernel of its
    /// own.
    pub(super) fn listed(&self) -> usize {
        self.shape.total_kv_heads.next_power_of_two().max(FEWEST_RANGES)
    }

    /// Candidates of a pivot bin that the last kernel orders.
    pub(super) fn candidates(&self) -> usize {
        let fits = self.finishing(MOST_CANDIDATES) <= self.room();
        if fits { MOST_CANDIDATES } else { FEWEST_CANDIDATES }
    }

    /// Whether shared memory has room for a set's tokens, too.
    pub(super) fn gathers(&self) -> bool {
        self.finishing(self.candidates()) + self.shape.width <= self.room()
    }

    /// The 32-bit numbers of shared memory that the last kernel takes, with room for `candidates`.
    fn finishing(&self, candidates: usize) -> usize {
        let bitmasks = (2 + BITMASKS) * self.words();
        let ordering = 2 * (2 * candidates + FINER);
        bitmasks + ordering + self.listed() + self.beside(self.widest()) + self.summing(false)
    }

    /// The 32-bit numbers of shared memory for sums of exponentials, in a kernel that `joins` the
    /// scores of a group, or in the last kernel.
    fn summing(&self, joins: bool) -> usize {
        let all = joins || self.shape.measures;
        let some = if all { self.shape.group } else { 1 };
        let planes = self.planes_of(self.widest());
        2 * planes * some + 2 * planes
    }
}
