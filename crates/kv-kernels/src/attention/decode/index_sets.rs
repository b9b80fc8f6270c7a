//! Index sets as attention reads them: a row of 32-bit integers for each range, in a table.
//!
//! A step reads the first `SINKS` slots of a range, the slots of `READ` tokens that are listed in
//! the row from `FIRST` on (a token's slot is its index less `FREED`), and all slots from `LOCAL`
//! on. [`crate::cis_select`] writes the rows, and keeps more in them.

use burn::tensor::{Int, Tensor};

/// Where the step's set begins in the row, tokens that are no longer read left out.
pub(crate) const FIRST: usize = 2;

/// How many of its tokens are read.
pub(crate) const READ: usize = 3;

/// First slot that is read from behind the set, counted from the range's first.
pub(crate) const LOCAL: usize = 4;

/// What a token's index is ahead of its slot.
pub(crate) const FREED: usize = 5;

/// First slots that are read in any case.
pub(crate) const SINKS: usize = 18;

/// Index sets of a layer's ranges, and the vectors of the block's steps that later ones are
/// compared with.
#[derive(Debug, Clone)]
pub struct IndexSets {
    pub(crate) table: Tensor<2, Int>,
    pub(crate) vectors: Tensor<4>,
    pub(crate) sets: usize,
    pub(crate) width: usize,
    /// The most tokens that are always attended to.
    pub(crate) always: usize,
    /// The most tokens that a retrieval finds.
    pub(crate) top: usize,
}
