//! Which calls are selected by histograms: what the kernels take of shared memory.

use super::{BINS, FEWEST_CANDIDATES, FINER, MOST_CANDIDATES, PART_WORDS};
use crate::cis::bitmask::{BITMASKS, WORD};
use crate::cis::sizes::Sizes;

/// Slots of a range beyond which many cubes share its selection: where sort keys are made with the
/// logits of one query, and where the scores of a group are joined first.
const LONGEST: usize = 8_192;
const LONGEST_OF_GROUPS: usize = 2_048;
/// Words that the size of a large bitmask is a multiple of.
const COARSEST: usize = 256;
/// Ranges beyond which calls are not selected so, as each cube lists the ranges that retrieve; and
/// the fewest that there is room for.
const MOST_RANGES: usize = 4_096;
const FEWEST_RANGES: usize = 256;

impl Sizes {
    /// Whether ranges are so long that many cubes are to share a selection.
    pub(in crate::cis) fn is_long(&self) -> bool {
        self.longest() > if self.direct() { LONGEST } else { LONGEST_OF_GROUPS }
    }

    /// Whether shared memory has room for the bitmasks of ranges, and for bins.
    pub(in crate::cis) fn has_room_for_histogram(&self) -> bool {
        let counting = BINS + 2 * PART_WORDS + self.listed() + self.summing(true);
        self.shape.total_kv_heads <= MOST_RANGES
            && counting.max(self.finishing(FEWEST_CANDIDATES)) <= self.room()
    }

    /// Words of the bitmask of the longest range, rounded up: each number is a kernel of its own.
    pub(super) fn words(&self) -> usize {
        let words = self.longest().div_ceil(WORD);
        words.next_power_of_two().min(words.next_multiple_of(COARSEST))
    }

    /// Ranges that a cube lists, rounded up: each number is a kernel of its own.
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

    /// Numbers of shared memory that the last kernel takes.
    fn finishing(&self, candidates: usize) -> usize {
        let bitmasks = (2 + BITMASKS) * self.words();
        let ordering = 2 * (2 * candidates + FINER);
        bitmasks + ordering + self.listed() + self.beside(self.widest()) + self.summing(false)
    }

    /// Numbers of shared memory that sums take, of a kernel that joins scores or of the last one.
    fn summing(&self, joins: bool) -> usize {
        let all = joins || self.shape.measures;
        let some = if all { self.shape.group } else { 1 };
        let planes = self.planes_of(self.widest());
        2 * planes * some + 2 * planes
    }
}
