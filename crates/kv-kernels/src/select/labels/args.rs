//! The arguments and results of `label_scores` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

/// The arguments of [`crate::label_scores`]. `lists` and `sources` may be any tensor unless rows
/// share lists.
#[derive(ExtensionType)]
pub(crate) struct LabelScoresArgs<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) query: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[B, Hq, r]`
    pub(crate) channels: IntTensor<B>,
    /// `[B, Hq, 3]`
    pub(crate) budgets: IntTensor<B>,
    /// `[B, Hq, 3 + M]`
    pub(crate) lists: IntTensor<B>,
    /// `[B, Hq, 1 or 2]`
    pub(crate) sources: IntTensor<B>,
    /// Whether rows share lists.
    pub(crate) shares: bool,
    pub(crate) layer: usize,
    pub(crate) period: usize,
    /// `T`
    pub(crate) columns: usize,
}
