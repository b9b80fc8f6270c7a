//! The comptime configuration of the kernel of `update_sketch`.

use super::accumulate::Blueprint as Accumulation;
use crate::sketch::count_sketch::SketchConfig;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct UpdateBlueprint {
    /// Vectors of 4 of a row.
    pub(crate) columns: usize,
    /// Whether this kernel adds probabilities. Otherwise `accumulate_kernel` has, and has left each
    /// part's highest score.
    pub(crate) accumulates: bool,
    /// Whether a cube's barrier leaves global memory unordered, so that a fence is needed.
    pub(crate) fenced: bool,
    /// How probabilities are added, by a cube of at least two units for each vector of a row.
    pub(crate) scores: Accumulation,
    pub(crate) sketch: SketchConfig,
}

impl UpdateBlueprint {
    /// Teams of units, each of which takes a row: its key and its value.
    pub(super) fn teams(&self) -> usize {
        self.scores.units / (2 * self.columns)
    }
}
