//! Arguments through which the five kernels pass on their results.

use cubecl::prelude::*;

use crate::cis::blueprint::Blueprint;
use crate::cis::kernel_args::{Scores, StepRanges};

/// The ranges of a step, and their tasks.
#[derive(CubeType, CubeLaunch)]
pub(super) struct DueRanges {
    pub(super) ranges: StepRanges,
    /// The tasks of each range, `[P]`, bits [`TO_SCORE`](super::tasks::TO_SCORE) and
    /// [`TO_RETRIEVE`](super::tasks::TO_RETRIEVE).
    pub(super) tasks: Box<[u32]>,
}

/// Scores of ranges, which are scored in parts.
#[derive(CubeType, CubeLaunch)]
pub(super) struct PartScores {
    pub(super) scores: Scores,
    /// The largest logit of each part, and the sum of the exponentials of the logits less the
    /// largest, `[P, parts, G, 2]`.
    pub(super) part_sums: Box<[f32]>,
    /// Parts of a range.
    pub(super) parts: usize,
}

/// Counts of scores.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ScoreCounts {
    /// Scores in each bin, `[P, BINS]`.
    pub(super) bins: Box<[Atomic<u32>]>,
    /// Candidates found so far for the `k_top`-th and for the `k_dilate`-th highest score, `[P,
    /// 2]`.
    pub(super) tallies: Box<[Atomic<u32>]>,
}

/// The slots whose scores are in a pivot bin, the bin of the `k_top`-th or `k_dilate`-th highest
/// score.
#[derive(CubeType, CubeLaunch)]
pub(super) struct PivotCandidates {
    /// Sort keys and slots of the candidates for both pivots, `[P, 2, candidates, 2]`.
    pub(super) candidates: Box<[u32]>,
    /// How many scores are above each pivot bin, and how many are in it, `[P, PIVOTS]`.
    pub(super) pivots: Box<[u32]>,
}

/// Sizes of the kernels' shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Room {
    /// The most ranges that a cube lists.
    pub(super) ranges: usize,
    /// The most candidates of a pivot bin.
    pub(super) candidates: usize,
}

/// Comptime configuration of the last kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct FinishBlueprint {
    pub(super) step: Blueprint,
    pub(super) room: Room,
    /// Words of the bitmask of the longest range, at most.
    pub(super) words: usize,
    /// Whether shared memory has room for a set's tokens, and cubes gather them there.
    pub(super) gathers: bool,
}
