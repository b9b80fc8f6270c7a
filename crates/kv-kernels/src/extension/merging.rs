//! Tokens that are merged, or of which a subset stands for all.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

use crate::average_scores::AverageWeights;
use crate::balance::WalkConfig;
use crate::merge_nearest::NearestConfig;
use crate::merge_slots::MergeConfig;

/// What halves lists; what its configuration does not use is any tensor.
#[derive(ExtensionType)]
pub(crate) struct Walk<B: Backend> {
    /// `[P, N]`
    pub(crate) lists: IntTensor<B>,
    /// `[P]`
    pub(crate) counts: IntTensor<B>,
    /// `[P]`
    pub(crate) log_gamma: FloatTensor<B>,
    /// `[P * centres * D]`
    pub(crate) means: FloatTensor<B>,
    /// `[P * N]`
    pub(crate) weights: FloatTensor<B>,
    /// `[P * 2]`
    pub(crate) seeds: IntTensor<B>,
    /// `[P * N]`
    pub(crate) numbers: FloatTensor<B>,
}

/// What halving returns, as [`crate::Balanced`] has it.
#[derive(ExtensionType)]
pub(crate) struct Classes<B: Backend> {
    pub(crate) signs: IntTensor<B>,
    pub(crate) kept: IntTensor<B>,
    pub(crate) failed: IntTensor<B>,
}

/// What is merged into what, as [`crate::MergeLists`] has it.
#[derive(ExtensionType)]
pub(crate) struct Merges<B: Backend> {
    /// `[Sv, D]`, like the values, where victims are in a pool of their own.
    pub(crate) from_keys: FloatTensor<B>,
    pub(crate) from_values: FloatTensor<B>,
    pub(crate) victims: IntTensor<B>,
    pub(crate) victim_counts: IntTensor<B>,
    pub(crate) targets: IntTensor<B>,
    pub(crate) victim_weights: FloatTensor<B>,
    pub(crate) kept: IntTensor<B>,
    pub(crate) kept_counts: IntTensor<B>,
    pub(crate) kept_weights: FloatTensor<B>,
    /// `[P, D]`, where there are queries.
    pub(crate) queries: FloatTensor<B>,
}

/// Merged pools, and what the kept slots weigh.
#[derive(ExtensionType)]
pub(crate) struct MergedPools<B: Backend> {
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) values: FloatTensor<B>,
    /// `[P, M, 2]`, or `[P, M, 4]` with votes.
    pub(crate) weights: FloatTensor<B>,
    /// `[P, M]`
    pub(crate) guarded: IntTensor<B>,
}

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

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait MergeOps: Backend {
    /// Walks every block of every list.
    fn balance(
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        #[extension_type] walk: Walk<Self>,
        config: WalkConfig,
    ) -> Classes<Self>;

    /// Places among `among` `[P, M]` whose keys are most alike to those of `of` `[P, N]`, and
    /// cosines.
    fn nearest_slots(
        keys: FloatTensor<Self>,
        of: IntTensor<Self>,
        of_counts: IntTensor<Self>,
        among: IntTensor<Self>,
        among_counts: IntTensor<Self>,
        earlier: bool,
    ) -> (IntTensor<Self>, FloatTensor<Self>);

    /// Indices of every row by score, `[R, T]`.
    fn rankings(scores: FloatTensor<Self>) -> IntTensor<Self>;

    /// When each of every row has its turn where groups compete as one, all `[R, T]`.
    fn turns_of_groups(
        scores: FloatTensor<Self>,
        ranked: IntTensor<Self>,
        leaders: IntTensor<Self>,
    ) -> FloatTensor<Self>;

    /// Merges victims into kept slots of `keys` and `values` `[S, D]`, in place.
    fn merge_slots(
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        #[extension_type] merges: Merges<Self>,
        config: MergeConfig,
    ) -> MergedPools<Self>;

    /// Merges one victim of every range into its most similar slot, in place, behind averages of
    /// logits where there are any.
    fn merge_nearest(
        #[extension_type] pools: MergingPools<Self>,
        #[extension_type] merges: StepMerges<Self>,
        config: NearestConfig,
    ) -> MergingPools<Self>;

    /// Takes scores of logits `[S, G]` into averages `[S]`, in place.
    fn average_scores(
        log_scores: FloatTensor<Self>,
        log_samples: FloatTensor<Self>,
        logits: FloatTensor<Self>,
        log_weights: FloatTensor<Self>,
        weighted: bool,
        weights: AverageWeights,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
