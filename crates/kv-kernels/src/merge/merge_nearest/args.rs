//! The arguments and results of `merge_nearest` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

/// The tensors of [`crate::MergingSlots`], written in place.
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

/// The victims of a step, and its queries and logits. A tensor that is not used may be any tensor.
#[derive(ExtensionType)]
pub(crate) struct StepMerges<B: Backend> {
    /// `[B, Hkv]`; all tensors but the last two have this shape.
    pub(crate) offsets: IntTensor<B>,
    pub(crate) lengths: IntTensor<B>,
    pub(crate) victims: IntTensor<B>,
    /// Not 0 where the victim is merged.
    pub(crate) goes: IntTensor<B>,
    /// `[B, Hq, D]`
    pub(crate) queries: FloatTensor<B>,
    /// `[S, G]`
    pub(crate) logits: FloatTensor<B>,
}
