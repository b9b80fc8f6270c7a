//! The arguments and results of the ops on labels as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use crate::backend::optional::OptionalInt;

/// The arguments of [`crate::label_scores`].
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
    /// `[B, Hq, 3 + M]`, where rows share lists.
    #[extension_type]
    pub(crate) lists: OptionalInt<B>,
    /// `[B, Hq, 1 or 2]`, where rows share lists.
    #[extension_type]
    pub(crate) sources: OptionalInt<B>,
    pub(crate) layer: usize,
    pub(crate) period: usize,
    /// `T`
    pub(crate) columns: usize,
}

/// The arguments of [`crate::copy_labels`].
#[derive(ExtensionType)]
pub(crate) struct CopyLabelsArgs<B: Backend> {
    /// `[B, N, D]`
    pub(crate) query: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[B, Hkv, r]`
    pub(crate) channels: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[S, r]`, written in place.
    pub(crate) labels: FloatTensor<B>,
}
