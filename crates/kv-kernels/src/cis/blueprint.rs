//! What fixes the code of the kernels that choose.

use super::{ScoreReduction, SimilarityReduction};

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    /// Vectors of a row.
    pub(crate) columns: usize,
    /// Units that share a row, a power of two within a plane.
    pub(crate) team: usize,
    /// Whether matrix instructions score rows, by tiles of 16: then a team is of 4, and a unit has
    /// every fourth vector.
    pub(crate) tiles: bool,
    /// Units of a cube, and of a plane, at least.
    pub(crate) units: usize,
    pub(crate) plane: usize,
    /// Vectors that similarity is of, and their length.
    pub(crate) parts: usize,
    pub(crate) length: usize,
    pub(crate) sets: usize,
    pub(crate) width: usize,
    pub(crate) reduction: ScoreReduction,
    pub(crate) similarity: SimilarityReduction,
    /// Whether sets are shared at all, and with steps that shared themselves.
    pub(crate) shares: bool,
    pub(crate) chains: bool,
    /// Whether steps that retrieve read their own choice rather than their set.
    pub(crate) reads_choice: bool,
    /// Whether all ranges are scored.
    pub(crate) measures: bool,
    /// Whether the kernel that selects scores its range first, or finds scores.
    pub(crate) scores: bool,
    /// Whether barriers for shared memory leave memory unordered.
    pub(crate) fenced: bool,
    /// Slots whose ordered scores shared memory has room for; 0 where they go to memory.
    pub(crate) staged: usize,
    /// Rows that a team reads before it waits for the first, or tiles that a plane does.
    pub(crate) ahead: usize,
    /// Whether the scores go to the kernels of `histogram_topk/`, rather than to one cube a range.
    pub(crate) feeds_histogram: bool,
}

impl Blueprint {
    /// Whether scores are ordered as they are made: those of one query are in the order of its
    /// weights.
    pub(crate) fn direct(&self) -> bool {
        self.group == 1 && !self.measures
    }

    /// Planes of a cube, at most.
    pub(crate) fn planes(&self) -> usize {
        self.units.div_ceil(self.plane)
    }

    /// Query heads whose logits a unit gets.
    pub(crate) fn held(&self) -> usize {
        self.group.div_ceil(self.team)
    }
}
