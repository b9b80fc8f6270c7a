//! The arguments and results of `merge_nearest` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use crate::backend::optional::OptionalFloat;

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
    /// A number that merges add up.
    #[extension_type]
    pub(crate) inherited: OptionalFloat<B>,
}

/// The victims of a step, its queries and logits, and which merges slots take.
#[derive(ExtensionType)]
pub(crate) struct StepMerges<B: Backend> {
    /// `[B, Hkv]`, as lengths, victims and `goes`.
    pub(crate) offsets: IntTensor<B>,
    pub(crate) lengths: IntTensor<B>,
    pub(crate) victims: IntTensor<B>,
    /// Not 0 where the victim is merged.
    pub(crate) goes: IntTensor<B>,
    /// `[B, Hq, D]`
    #[extension_type]
    pub(crate) queries: OptionalFloat<B>,
    /// `[S, G]`, where averages take them in.
    #[extension_type]
    pub(crate) logits: OptionalFloat<B>,
    /// Which merges each slot takes, `[S]`.
    #[extension_type]
    pub(crate) takes: OptionalFloat<B>,
}
