//! The comptime configuration of the kernel for matrix instructions (`tensor_core.rs`).

use cubecl::prelude::*;

use super::Features;

/// Slots of a tile: the keys that a plane multiplies in one step.
pub(crate) const MMA_KEYS: usize = 16;
/// Planes of a cube where heads, or parts of heads, fill the device with two cubes a processor.
pub(crate) const PLANES: usize = 4;
/// Banks of shared memory.
const BANKS: usize = 32;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    /// `D`, a multiple of 32.
    pub(crate) head_dim: usize,
    /// 32-bit words of a vector of values: 8 lanes take `16 * words` columns.
    pub(crate) words: usize,
    pub(crate) parts: KvSplit,
    /// The 32-bit numbers of shared memory that a cube takes, at least.
    pub(crate) room: usize,
    /// Planes of a cube.
    pub(crate) planes: usize,
    /// Whether a cube copies the slots of its part to shared memory first, where slots are listed.
    pub(crate) staged: bool,
    /// Where logits go.
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
    /// One cube takes all slots of a head and writes the output.
    None,
    /// Partial sums go to global memory, where `combine.rs` sums them.
    Global,
    /// This many cubes of a cluster take the parts of a head, and reduce the sums among themselves.
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

/// The distance in shared memory between the logits of two query heads: whole rows of banks and a
/// quarter row, so that four heads write without bank conflicts.
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
    /// Logits stay in shared memory, which has room for the cube's part, and are written together
    /// at the end. This costs a fraction of single writes.
    Shared,
    /// Logits stay in shared memory, where the cube or cluster that has the whole head finds the
    /// slot of least importance. The kernel then takes an [`Eviction`](super::eviction::Eviction).
    ArgminInPlace {
        /// Whether the newest token is no candidate.
        spares_newest: bool,
        /// Heads of a sequence that evict one common slot, or 0 where each head evicts its own.
        together: usize,
        /// Whether slots are compared by records of importances rather than by this step's.
        remembers: bool,
    },
}

impl LogitsSink {
    /// Heads of a sequence that evict one common slot, or 0.
    pub(super) fn together(self) -> usize {
        match self {
            Self::ArgminInPlace { together, .. } => together,
            _ => 0,
        }
    }

    /// Whether the newest token is no candidate.
    pub(super) fn spares_newest(self) -> bool {
        matches!(self, Self::ArgminInPlace { spares_newest: true, .. })
    }

    /// Whether every step's importances are recorded, even where nothing is evicted yet.
    pub(super) fn remembers(self) -> bool {
        matches!(self, Self::ArgminInPlace { remembers: true, .. })
    }
}
