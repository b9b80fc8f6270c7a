//! The comptime configuration of the kernels that choose a step's slots.

use super::{ScoreReduction, SimilarityReduction};

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    /// Vectors of a row.
    pub(crate) columns: usize,
    /// Units that share a row, a power of two within a plane.
    pub(crate) team: usize,
    /// Whether matrix instructions score rows, in tiles of 16 slots. A team then has 4 units, each
    /// of which holds every fourth vector of a row.
    pub(crate) tiles: bool,
    /// Units of a cube, and the least number of units of a plane.
    pub(crate) units: usize,
    pub(crate) plane: usize,
    /// Vectors of a range by which steps are compared, and their length.
    pub(crate) parts: usize,
    pub(crate) length: usize,
    pub(crate) sets: usize,
    pub(crate) width: usize,
    pub(crate) reduction: ScoreReduction,
    pub(crate) similarity: SimilarityReduction,
    /// Whether steps share sets; and whether they may share with a step that has itself shared
    /// ([`Earlier::Any`](super::Earlier)).
    pub(crate) shares: bool,
    pub(crate) chains: bool,
    /// Whether a step that retrieves reads the `k` highest scores alone, without the neighbours of
    /// its set.
    pub(crate) reads_choice: bool,
    /// Whether a step that shares a set also reads what has left the locals since the retrieval.
    pub(crate) tail: bool,
    /// Whether all ranges are scored, for their log-sum-exps.
    pub(crate) measures: bool,
    /// Whether the kernel scores its range itself. Otherwise an earlier kernel has written the
    /// scores.
    pub(crate) scores: bool,
    /// Whether a cube's barrier leaves global memory unordered, so that a fence is needed.
    pub(crate) fenced: bool,
    /// Slots whose sort keys shared memory has room for, or 0 where sort keys are in global memory.
    pub(crate) staged: usize,
    /// Rows that a team reads before it waits for the first, or tiles that a plane does.
    pub(crate) ahead: usize,
    /// Scores that a unit reads before it waits for the first, a divisor of
    /// [`WORD`](super::bitmask::WORD).
    pub(crate) chunk: usize,
    /// Whether the scores feed the kernels of `histogram_topk/`, not a selection by one cube a
    /// range.
    pub(crate) feeds_histogram: bool,
}

impl Blueprint {
    /// Whether sort keys are made directly of logits. With one query head a group, logits and
    /// weights have the same order, and no log-sum-exp is needed.
    pub(crate) fn direct(&self) -> bool {
        self.group == 1 && !self.measures
    }

    /// Planes of a cube, at most.
    pub(crate) fn planes(&self) -> usize {
        self.units.div_ceil(self.plane)
    }

    /// Query heads of whose logits a unit holds a share.
    pub(crate) fn held(&self) -> usize {
        self.group.div_ceil(self.team)
    }
}
