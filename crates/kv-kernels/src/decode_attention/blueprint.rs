//! What fixes the code of the kernel for matrix instructions.

use cubecl::prelude::*;

use super::Features;

/// Slots of a plane's step.
pub(crate) const TILE: usize = 16;
/// Planes of a cube where heads or their parts fill the device with two cubes a processor.
pub(crate) const PLANES: usize = 4;
/// Banks of shared memory.
const BANKS: usize = 32;

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    /// `D`, a multiple of 32.
    pub(crate) head_dim: usize,
    /// 32-bit words of a vector of values: 8 lanes take `16 * words` columns.
    pub(crate) words: usize,
    pub(crate) parts: Parts,
    /// Numbers that shared memory has room for, at least.
    pub(crate) room: usize,
    /// Planes of a cube.
    pub(crate) planes: usize,
    /// Whether shared memory has room for a part's places, of lists.
    pub(crate) staged: bool,
    /// What becomes of logits.
    pub(crate) logits: Logits,
    pub(crate) features: Features,
}

impl Blueprint {
    /// Cubes of a cluster.
    pub(super) fn cubes(&self) -> usize {
        self.parts.cubes()
    }
}

/// What becomes of a cube's sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Parts {
    /// The output: the cube has the whole range.
    Whole,
    /// They are written, for a kernel behind.
    Written,
    /// The cubes of a cluster, so many, have the parts of the range, and join them.
    Joined(usize),
}

impl Parts {
    /// Cubes of a cluster.
    pub(crate) fn cubes(self) -> usize {
        match self {
            Self::Joined(cubes) => cubes,
            Self::Whole | Self::Written => 1,
        }
    }
}

/// Shared memory between the query heads' logits of a part: a quarter of the banks more than whole
/// rows of them, so that four heads write without conflict.
#[cube]
pub(super) fn stride_of(part: usize) -> usize {
    part.div_ceil(BANKS) * BANKS + comptime!(BANKS / 4)
}

/// What becomes of logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Logits {
    /// Nothing.
    Dropped,
    /// Each is written at once.
    Written,
    /// They stay in shared memory, which has room for a cube's part, and are written in the end: a
    /// fraction of the cost.
    Collected,
    /// They stay there, and the cube or cluster, which has its whole head, finds the slot of least
    /// importance, for which `numerators` holds logarithms of the values' norms, `view` the heads'
    /// limits, and `partial` the bits of the newest tokens' places, which become the next ones'.
    Weighed {
        /// Whether the newest token is no candidate.
        spares_newest: bool,
        /// Heads of a sequence that give up the same slot, or 0 where each head has its own. Then
        /// importances go to `scores`, `[pairs, stride]`, and `stats` counts a sequence's arrivals,
        /// `[B, ARRIVALS]`.
        together: usize,
    },
}

impl Logits {
    /// Heads that give up a slot together, 0 for none.
    pub(super) fn together(self) -> usize {
        match self {
            Self::Weighed { together, .. } => together,
            _ => 0,
        }
    }
}
