//! The comptime configuration of the kernel of `merge_nearest`.

use crate::merge::merge_slots::KeyRule;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Vectors of a row.
    pub(crate) columns: usize,
    /// Units that share a slot's key: a power of two, at most a plane.
    pub(crate) team: usize,
    /// Units of a cube, a multiple of `team`.
    pub(crate) units: usize,
    /// Slots whose keys a team reads ahead.
    pub(crate) ahead: usize,
    /// The most planes of a cube.
    pub(crate) planes: usize,
    pub(crate) rule: KeyRule,
    pub(crate) literal: bool,
    /// Query heads of a key-value head, whose queries are given; 0 without queries.
    pub(crate) group: usize,
    /// Logits of a slot that are added to its average; 0 without logits.
    pub(crate) averaged: usize,
    /// Whether the slots say which merges they take.
    pub(crate) choosy: bool,
    /// Whether merged slots have the sum of an inherited number.
    pub(crate) inherits: bool,
    /// Slots whose averages a unit computes at a time.
    pub(crate) averages: usize,
}

impl Blueprint {
    /// Vectors of a row that a unit of a team holds. The last vectors may lie outside the row.
    pub(crate) fn own(self) -> usize {
        self.columns.div_ceil(self.team)
    }
}
