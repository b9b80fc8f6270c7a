//! The arguments and results of `top_slots` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

/// The scores, and the rule by which they are chosen.
#[derive(ExtensionType)]
pub(crate) struct TopSlotsArgs<B: Backend> {
    /// `[R, T]`
    pub(crate) scores: FloatTensor<B>,
    /// Scores of every row that are candidates, `[R]`.
    pub(crate) lengths: IntTensor<B>,
    /// How many scores of each row are wanted, `[R]`; not read where `by_bound`.
    pub(crate) counts: IntTensor<B>,
    /// The lowest wanted score of each row, `[R]`; read where `by_bound`.
    pub(crate) bounds: FloatTensor<B>,
    /// The most scores that are chosen of a row.
    pub(crate) most: usize,
    /// Whether all scores from a bound on are wanted, not a number of them.
    pub(crate) by_bound: bool,
}
