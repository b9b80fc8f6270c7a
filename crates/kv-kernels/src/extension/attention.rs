//! Decode attention.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

use crate::add_probabilities::GroupReduction;
use crate::decode_attention::DecodeConfig;
use crate::evicting_attention::EvictionConfig;

/// What an eviction looks at; what its configuration does not use is any tensor.
#[derive(ExtensionType)]
pub(crate) struct Eviction<B: Backend> {
    /// `[S]`
    pub(crate) log_norms: FloatTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) limits: IntTensor<B>,
    /// `[B, Hkv]`, written in place.
    pub(crate) places: IntTensor<B>,
    /// `[B, ARRIVALS]`, 0 before and behind.
    pub(crate) arrivals: IntTensor<B>,
    /// `[S]`
    pub(crate) positions: IntTensor<B>,
    /// `[B]`
    pub(crate) now: IntTensor<B>,
}

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait AttentionOps: Backend {
    /// Returns output `[B, Hq, D]`, log-sum-exp `[B, Hq]` and probabilities `[S, G]`; the last two
    /// are placeholders of one element where `config` does not ask for them.
    #[allow(clippy::too_many_arguments)]
    fn decode_attention(
        query: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        log_weights: FloatTensor<Self>,
        numerators: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        view: IntTensor<Self>,
        config: DecodeConfig,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// Returns output `[B, Hq, D]`, the next tokens' places `[B, Hkv]`, the counters of arrivals,
    /// and log-importances `[S]`, a placeholder where `config` does not ask for them.
    fn evicting_attention(
        query: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        log_weights: FloatTensor<Self>,
        #[extension_type] eviction: Eviction<Self>,
        config: EvictionConfig,
    ) -> (FloatTensor<Self>, IntTensor<Self>, IntTensor<Self>, FloatTensor<Self>);

    /// Adds probabilities of logits `[S, G]` to `sums` `[S]`, in place.
    fn add_probabilities(
        sums: FloatTensor<Self>,
        logits: FloatTensor<Self>,
        log_sum_exp: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        reduction: GroupReduction,
    ) -> FloatTensor<Self>;

    /// The same times norms of values `[S, D]`; returns sums and norms `[S]`, in which those of
    /// ranges' last slots are new.
    #[allow(clippy::too_many_arguments)]
    fn add_contributions(
        sums: FloatTensor<Self>,
        norms: FloatTensor<Self>,
        values: FloatTensor<Self>,
        logits: FloatTensor<Self>,
        log_sum_exp: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        reduction: GroupReduction,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
