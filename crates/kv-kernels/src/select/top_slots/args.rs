//! The arguments and results of `top_slots` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

/// What is chosen among, and how.
#[derive(ExtensionType)]
pub(crate) struct TopSlotsArgs<B: Backend> {
    /// `[R, T]`
    pub(crate) scores: FloatTensor<B>,
    /// Scores of every row that count, `[R]`.
    pub(crate) lengths: IntTensor<B>,
    /// How many of each row are wanted, `[R]`; not read where `by_bound`.
    pub(crate) counts: IntTensor<B>,
    /// The lowest scores that are wanted, `[R]`; read where `by_bound`.
    pub(crate) bounds: FloatTensor<B>,
    /// The most that are chosen of a row.
    pub(crate) most: usize,
    /// Whether all scores from a bound on are wanted, rather than a number of them.
    pub(crate) by_bound: bool,
}
