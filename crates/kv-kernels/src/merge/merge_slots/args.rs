//! The arguments and results of `merge_slots` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::MergeConfig;
use crate::backend::optional::OptionalFloat;

/// The lists of [`crate::MergeLists`], and the pools.
#[derive(ExtensionType)]
pub(crate) struct MergeSlotsArgs<B: Backend> {
    /// `[S, D]`, written in place.
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`, written in place.
    pub(crate) values: FloatTensor<B>,
    /// `[Sv, D]`, where victims are in a pool of their own.
    #[extension_type]
    pub(crate) from_keys: OptionalFloat<B>,
    /// `[Sv, D]`, where victims are in a pool of their own.
    #[extension_type]
    pub(crate) from_values: OptionalFloat<B>,
    pub(crate) victims: IntTensor<B>,
    pub(crate) victim_counts: IntTensor<B>,
    pub(crate) targets: IntTensor<B>,
    pub(crate) victim_weights: FloatTensor<B>,
    pub(crate) kept: IntTensor<B>,
    pub(crate) kept_counts: IntTensor<B>,
    pub(crate) kept_weights: FloatTensor<B>,
    /// `[P, D]`
    #[extension_type]
    pub(crate) queries: OptionalFloat<B>,
    pub(crate) config: MergeConfig,
}

/// The merged pools, and the new weights of the kept slots.
#[derive(ExtensionType)]
pub(crate) struct MergedPools<B: Backend> {
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) values: FloatTensor<B>,
    /// `[P, M, 2]`, `[P, M, 4]` with votes, or `[P, M, 5]` with votes and a sum.
    pub(crate) weights: FloatTensor<B>,
    /// `[P, M]`
    pub(crate) guarded: IntTensor<B>,
}
