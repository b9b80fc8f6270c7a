//! What the kernels hand on to each other.

use cubecl::prelude::*;

use crate::cis::blueprint::Blueprint;
use crate::cis::kernel_args::{Scores, StepRanges};

/// The ranges of a step, and what is to be done with them.
#[derive(CubeType, CubeLaunch)]
pub(super) struct DueRanges {
    pub(super) ranges: StepRanges,
    /// [`TO_SCORE`](super::tasks::TO_SCORE) and [`TO_RETRIEVE`](super::tasks::TO_RETRIEVE) of each
    /// range, `[P]`.
    pub(super) tasks: Box<[u32]>,
}

/// Scores of ranges that are scored in parts.
#[derive(CubeType, CubeLaunch)]
pub(super) struct PartScores {
    pub(super) scores: Scores,
    /// Sums of exponentials of a part's logits, each behind its largest exponent, `[P, parts, G,
    /// 2]`.
    pub(super) part_sums: Box<[f32]>,
    /// Parts of a range.
    pub(super) parts: usize,
}

/// Counts of scores.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ScoreCounts {
    /// Scores in each bin, `[P, BINS]`.
    pub(super) bins: Box<[Atomic<u32>]>,
    /// Candidates of both searches so far, `[P, 2]`.
    pub(super) tallies: Box<[Atomic<u32>]>,
}

/// The slots whose scores are in a pivot bin.
#[derive(CubeType, CubeLaunch)]
pub(super) struct PivotCandidates {
    /// Sort keys and their slots, `[P, 2, candidates, 2]`, of both searches.
    pub(super) candidates: Box<[u32]>,
    /// How many scores are above the pivot bins, and within them, `[P, PIVOTS]`.
    pub(super) pivots: Box<[u32]>,
}

/// Room that the kernels have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Room {
    /// Ranges that shared memory lists, at most.
    pub(super) ranges: usize,
    /// Candidates of a search.
    pub(super) candidates: usize,
}

/// What fixes the generated code of the last kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct FinishBlueprint {
    pub(super) step: Blueprint,
    pub(super) room: Room,
    /// Words of the bitmask of the longest range, at most.
    pub(super) words: usize,
    /// Whether shared memory has room for a set's tokens, and cubes gather them there.
    pub(super) gathers: bool,
}
