//! The comptime configuration of the kernel for matrix instructions (`tensor_core.rs`).

use crate::attention::decode::blueprint::KvSplit;
use crate::attention::decode::mma_fragments::Rows;
use crate::components::ptx::Halves;
use crate::sketch::count_sketch::SketchConfig;

/// 32-bit words of a vector of values. Lanes read entries in such vectors, and so slots too.
pub(crate) const WORDS: usize = 2;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    /// `D`, a multiple of 32.
    pub(crate) head_dim: usize,
    /// Planes of a cube.
    pub(crate) planes: usize,
    pub(crate) parts: KvSplit,
    /// Entries of a range that shared memory has room for, and one of zeros; 0 where entries stay
    /// in global memory.
    pub(crate) staged: usize,
    pub(crate) halves: Halves,
    pub(crate) sketch: SketchConfig,
}

impl Blueprint {
    pub(crate) fn rows(self) -> Rows {
        Rows { dim: self.head_dim, words: WORDS }
    }

    /// Cubes of a cluster.
    pub(crate) fn cubes(self) -> usize {
        self.parts.cubes()
    }
}
