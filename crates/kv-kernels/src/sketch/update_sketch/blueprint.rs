//! What fixes the generated code of an update.

use super::accumulate::Blueprint as Accumulation;
use crate::sketch::count_sketch::SketchConfig;

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct UpdateBlueprint {
    /// Vectors of 4 of a row.
    pub(crate) columns: usize,
    /// Whether scores are added up here; else the accumulation has left the parts' highest.
    pub(crate) accumulates: bool,
    /// Whether barriers order memory only for what is fenced.
    pub(crate) fenced: bool,
    /// How scores are added up, by a cube of two units a vector of a row, at least.
    pub(crate) scores: Accumulation,
    pub(crate) sketch: SketchConfig,
}

impl UpdateBlueprint {
    /// Teams of units that have a row each, its key and its value.
    pub(super) fn teams(&self) -> usize {
        self.scores.units / (2 * self.columns)
    }
}
