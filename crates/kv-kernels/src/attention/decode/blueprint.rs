//! What fixes the code of the kernel for matrix instructions.

use cubecl::prelude::*;

use super::Features;

/// Keys, and so slots, that a plane multiplies in one step.
pub(crate) const MMA_KEYS: usize = 16;
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
    pub(crate) parts: KvSplit,
    /// Numbers that shared memory has room for, at least.
    pub(crate) room: usize,
    /// Planes of a cube.
    pub(crate) planes: usize,
    /// Whether shared memory holds the slots of a cube's part, where these are listed.
    pub(crate) staged: bool,
    /// What becomes of logits.
    pub(crate) logits: LogitsSink,
    pub(crate) features: Features,
}

impl Blueprint {
    /// Cubes of a cluster.
    pub(super) fn cubes(&self) -> usize {
        self.parts.cubes()
    }
}

/// How the slots of a head are split among cubes, and where the partial sums of a cube go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum KvSplit {
    /// A cube has all slots of a head, and writes the output.
    None,
    /// Partial sums go to global memory, for a kernel behind.
    Global,
    /// The cubes of a cluster, this many, have the parts of a head, and reduce them.
    Cluster(usize),
}

impl KvSplit {
    /// Cubes of a cluster.
    pub(crate) fn cubes(self) -> usize {
        match self {
            Self::Cluster(cubes) => cubes,
            Self::None | Self::Global => 1,
        }
    }
}

/// Shared memory between the query heads' logits of a part: a quarter of the banks more than whole
/// rows of them, so that four heads write without conflict.
#[cube]
pub(super) fn stride_of(part: usize) -> usize {
    part.div_ceil(BANKS) * BANKS + comptime!(BANKS / 4)
}

/// Where logits go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum LogitsSink {
    /// Nowhere: they are not wanted.
    None,
    /// Each logit is written to global memory at once.
    Global,
    /// Logits stay in shared memory, which has room for a cube's part, and are written together in
    /// the end: a fraction of the cost.
    Shared,
    /// Logits stay in shared memory, and the cube or cluster, which has its whole head, finds the
    /// slot of least importance: the kernel has an [`Eviction`](super::eviction::Eviction) then.
    ArgminInPlace {
        /// Whether the newest token is no candidate.
        spares_newest: bool,
        /// Heads of a sequence that give up the same slot, or 0 where each head has its own.
        together: usize,
    },
}

impl LogitsSink {
    /// Heads that give up a slot together, 0 for none.
    pub(super) fn together(self) -> usize {
        match self {
            Self::ArgminInPlace { together, .. } => together,
            _ => 0,
        }
    }
}
