//! Which calls are sifted: what the kernels take of shared memory.

use super::{BINS, FEWEST_CANDIDATES, FINER, MOST_CANDIDATES, PART_WORDS};
use crate::gpu::planes_of;
use crate::retrieve_slots::call::Call;
use crate::retrieve_slots::marks::{MARKS, WORD};

/// Slots of a range beyond which many cubes sift its scores, so that one does not have to look at
/// all of them: where the scores of one query are ordered as they are made, and where those of a
/// group are joined first.
const LONGEST: usize = 8_192;
const LONGEST_OF_GROUPS: usize = 2_048;
/// Words of marks that many are a multiple of.
const COARSEST: usize = 256;
/// Ranges beyond which none is sifted, as each cube lists those that retrieve, and the fewest that
/// there is room for.
const MOST_RANGES: usize = 4_096;
const FEWEST_RANGES: usize = 256;

impl Call {
    /// Whether scores are sifted: those of long ranges, where shared memory has room for their
    /// marks and for bins.
    pub(in crate::retrieve_slots) fn sifts(&self) -> bool {
        let counting = BINS + 2 * PART_WORDS + self.listed() + self.summing(true);
        let longest = if self.direct() { LONGEST } else { LONGEST_OF_GROUPS };
        self.longest() > longest
            && self.pairs <= MOST_RANGES
            && counting.max(self.concluding(FEWEST_CANDIDATES)) <= self.room()
    }

    /// Words of marks of the longest range, rounded up: each number is a kernel of its own.
    pub(super) fn words(&self) -> usize {
        let words = self.longest().div_ceil(WORD);
        words.next_power_of_two().min(words.next_multiple_of(COARSEST))
    }

    /// Ranges that a cube lists, rounded up likewise.
    pub(super) fn listed(&self) -> usize {
        self.pairs.next_power_of_two().max(FEWEST_RANGES)
    }

    /// Scores of a bin that the cube that concludes orders.
    pub(super) fn candidates(&self) -> usize {
        let fits = self.concluding(MOST_CANDIDATES) <= self.room();
        if fits { MOST_CANDIDATES } else { FEWEST_CANDIDATES }
    }

    /// Whether shared memory has room for a set's tokens, too.
    pub(super) fn gathers(&self) -> bool {
        self.concluding(self.candidates()) + self.config.width <= self.room()
    }

    /// Numbers of shared memory that the end takes.
    fn concluding(&self, candidates: usize) -> usize {
        let marks = (2 + MARKS) * self.words();
        let ordering = 2 * (2 * candidates + FINER);
        marks + ordering + self.listed() + self.beside(self.widest()) + self.summing(false)
    }

    /// Numbers of shared memory that sums take, of a kernel that joins scores or of the last one.
    fn summing(&self, joins: bool) -> usize {
        let all = joins || self.config.measures || self.config.options.certified;
        let some = if all { self.group } else { 1 };
        let planes = planes_of(&self.query.client, self.widest());
        2 * planes * some + 2 * planes
    }
}
