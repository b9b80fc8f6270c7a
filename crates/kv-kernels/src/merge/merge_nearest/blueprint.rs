//! What fixes the code of the kernel.

use crate::merge::merge_slots::KeyRule;

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Vectors of a row.
    pub(crate) columns: usize,
    /// Units that share a slot's key: a power of two, at most a plane.
    pub(crate) team: usize,
    /// Units of a cube, a multiple of `team`.
    pub(crate) units: usize,
    /// Slots of which a team has the keys on their way.
    pub(crate) ahead: usize,
    /// Planes of a cube, at most.
    pub(crate) planes: usize,
    pub(crate) rule: KeyRule,
    pub(crate) literal: bool,
    /// Query heads of a range, whose queries are given; 0 where there are none.
    pub(crate) group: usize,
    /// Logits of a slot that go into its average; 0 where there are none.
    pub(crate) averaged: usize,
    /// Slots that a unit takes into averages at a time.
    pub(crate) averages: usize,
}

impl Blueprint {
    /// Columns of a row that a unit of a team has, of which the last may lie behind the row.
    pub(crate) fn own(self) -> usize {
        self.columns.div_ceil(self.team)
    }
}
