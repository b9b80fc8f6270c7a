//! The arguments and results of the ops on shared lists as backends take and return them.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, ExtensionType};

use crate::backend::optional::OptionalInt;

/// The newly chosen lists, and where they are stored.
#[derive(ExtensionType)]
pub(crate) struct KeepListsArgs<B: Backend> {
    /// `[B, Hq, 3 + M]`, written in place.
    pub(crate) lists: IntTensor<B>,
    /// Chosen tokens, `[R, M]`.
    pub(crate) indices: IntTensor<B>,
    /// How many tokens were chosen, `[R]`.
    pub(crate) found: IntTensor<B>,
    /// How many tokens were wanted, `[R]`; 0 for rows that keep their lists.
    pub(crate) wanted: IntTensor<B>,
    /// `[B, Hq, 3]`
    pub(crate) budgets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[layers, B, Hq, 3 + M]`, written in place.
    #[extension_type]
    pub(crate) board: OptionalInt<B>,
    /// The layer whose part of the board gets the lists.
    pub(crate) layer: usize,
}

/// The lists whose slots are returned.
#[derive(ExtensionType)]
pub(crate) struct ListSlotsArgs<B: Backend> {
    /// `[layers, B, Hq, 3 + M]`
    pub(crate) table: IntTensor<B>,
    /// `[B, Hq, 1 or 2]`
    pub(crate) sources: IntTensor<B>,
    /// `[B, Hq, 3]`
    pub(crate) budgets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// The most slots of a row.
    pub(crate) width: usize,
}
