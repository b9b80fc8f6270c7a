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
    #[extension_type]
    pub(crate) wanted: WantedScores<B>,
    /// The most scores that are chosen of a row.
    pub(crate) most: usize,
}

/// [`crate::Choice`] as backends take it.
#[derive(ExtensionType)]
pub(crate) enum WantedScores<B: Backend> {
    /// How many scores of each row are wanted, `[R]`.
    Top(IntTensor<B>),
    /// The lowest wanted score of each row, `[R]`.
    Above(FloatTensor<B>),
}
