//! Index sets as decode attention reads them: a table with one row of 32-bit integers for each head
//! range.
//!
//! A step attends to three runs of slots: the first `SINKS` slots of the range, the slots of the
//! `READ` tokens listed in the row from field `FIRST` on, and all slots from `LOCAL` on. A token's
//! slot is its index less `FREED`. [`crate::cis_select`] writes the rows; `cis/table.rs` documents
//! their other fields.

use burn::tensor::{Int, Tensor};

/// Field: where the tokens that the step attends to begin in the row.
pub(crate) const FIRST: usize = 2;

/// Field: how many listed tokens the step attends to.
pub(crate) const READ: usize = 3;

/// Field: the first local slot, counted from the range's first slot. The step attends to it and to
/// all later slots.
pub(crate) const LOCAL: usize = 4;

/// Field: by how much a token's index exceeds its slot, as tokens before it were freed.
pub(crate) const FREED: usize = 5;

/// Field: slots at the start of the range that every step attends to.
pub(crate) const SINKS: usize = 18;

/// The index sets of a layer, a few for each head range: the tokens that CIS (PrHS, section IV-A)
/// retrieved in the last block of decode steps. Each set is stored with the vectors of its step. A
/// later step of the block compares its own vectors with them, and shares the set if they are
/// similar. [`crate::SetRule`] has the numbers `k`, `m` and `τ` of each range.
#[derive(Debug, Clone)]
pub struct IndexSets {
    pub(crate) table: Tensor<2, Int>,
    pub(crate) vectors: Tensor<4>,
    pub(crate) sets: usize,
    pub(crate) width: usize,
    /// The most tokens that a step attends to besides its set: sinks and locals.
    pub(crate) always: usize,
    /// The most tokens that a retrieval may find.
    pub(crate) top: usize,
}
