//! The arguments and results of `evicting_attention` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::EvictionConfig;
use crate::backend::optional::{OptionalFloat, OptionalInt};

/// The arguments of an evicting attention.
#[derive(ExtensionType)]
pub(crate) struct EvictingArgs<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) query: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) values: FloatTensor<B>,
    /// `[S]`
    #[extension_type]
    pub(crate) log_weights: OptionalFloat<B>,
    /// `[S]`
    pub(crate) log_norms: FloatTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) limits: IntTensor<B>,
    /// Slots of the newest tokens, `[B, Hkv]`, counted from each range's first slot. They are
    /// replaced in place by the slots that the next tokens are written to.
    pub(crate) write_slots: IntTensor<B>,
    /// Counters, `[B, ARRIVALS]`, 0 before and after the call.
    pub(crate) arrivals: IntTensor<B>,
    /// `[S]`, where sinks and recents are kept, or the oldest of equal slots goes.
    #[extension_type]
    pub(crate) positions: OptionalInt<B>,
    /// `[B]`, where sinks and recents are kept.
    #[extension_type]
    pub(crate) now: OptionalInt<B>,
    /// Records of importances, `[S]`, where they are compared. They are raised in place.
    #[extension_type]
    pub(crate) records: OptionalFloat<B>,
    /// Positions of the newest tokens, `[B]`, where records are compared.
    #[extension_type]
    pub(crate) steps: OptionalInt<B>,
    pub(crate) config: EvictionConfig,
}

/// The results of an evicting attention.
#[derive(ExtensionType)]
pub(crate) struct Evicted<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) output: FloatTensor<B>,
    /// The slots that the next tokens are written to, `[B, Hkv]`.
    pub(crate) write_slots: IntTensor<B>,
    /// `[B, ARRIVALS]`
    pub(crate) arrivals: IntTensor<B>,
    /// `[S]`, where records are compared.
    #[extension_type]
    pub(crate) records: OptionalFloat<B>,
    /// Log-importances, `[S]`; a placeholder where `config` does not ask for them.
    pub(crate) importance: FloatTensor<B>,
}
