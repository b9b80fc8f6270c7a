//! The arguments and results of the ops on heads as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::{HeadConfig, PlacementKind};
use crate::slots::pool::SlotPools;

/// New tokens as projected; what `config` does not use is any tensor.
#[derive(ExtensionType)]
pub(crate) struct Projection<B: Backend> {
    /// `[N, (Hq + 2 Hkv) D]`
    pub(crate) projected: FloatTensor<B>,
    /// `[N]`
    pub(crate) positions: IntTensor<B>,
    /// `[P, D / 2]`
    pub(crate) cos: FloatTensor<B>,
    /// `[P, D / 2]`
    pub(crate) sin: FloatTensor<B>,
    /// `[D]`
    pub(crate) query_norm: FloatTensor<B>,
    /// `[D]`
    pub(crate) key_norm: FloatTensor<B>,
    pub(crate) config: HeadConfig,
}

/// Where new tokens go; what `place` does not use is any tensor.
#[derive(ExtensionType)]
pub(crate) struct PlacementArgs<B: Backend> {
    /// `[B, Hkv]`; the slots themselves where they are given.
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`, grown in place.
    pub(crate) lengths: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) next: IntTensor<B>,
    /// `[S]`, written in place.
    pub(crate) log_norms: FloatTensor<B>,
    pub(crate) place: PlacementKind,
}

/// What writing new tokens returns.
#[derive(ExtensionType)]
pub(crate) struct Written<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) query: FloatTensor<B>,
    #[extension_type]
    pub(crate) pools: SlotPools<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[S]`
    pub(crate) log_norms: FloatTensor<B>,
}
