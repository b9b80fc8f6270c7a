//! The arguments and results of `merge_nearest` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

/// What [`crate::MergingSlots`] has, written in place.
#[derive(ExtensionType)]
pub(crate) struct MergingPools<B: Backend> {
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) values: FloatTensor<B>,
    pub(crate) log_weights: FloatTensor<B>,
    pub(crate) log_scores: FloatTensor<B>,
    pub(crate) log_samples: FloatTensor<B>,
    pub(crate) votes: FloatTensor<B>,
    pub(crate) votes_high: FloatTensor<B>,
}

/// What a step merges of each range, and its queries and logits; what is not used is any tensor.
#[derive(ExtensionType)]
pub(crate) struct StepMerges<B: Backend> {
    /// `[B, Hkv]`, as the others but for the last two.
    pub(crate) offsets: IntTensor<B>,
    pub(crate) lengths: IntTensor<B>,
    pub(crate) victims: IntTensor<B>,
    /// Not 0 where the victim goes.
    pub(crate) goes: IntTensor<B>,
    /// `[B, Hq, D]`
    pub(crate) queries: FloatTensor<B>,
    /// `[S, G]`
    pub(crate) logits: FloatTensor<B>,
}
