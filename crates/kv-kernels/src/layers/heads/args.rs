//! The arguments and results of the ops on heads as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::{HeadConfig, PlacementKind};
use crate::slots::pool::SlotPools;

/// The projections of new tokens. A tensor that `config` does not use may be any tensor.
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

/// The slots of new tokens. A tensor that `place` does not use may be any tensor.
#[derive(ExtensionType)]
pub(crate) struct PlacementArgs<B: Backend> {
    /// `[B, Hkv]`; the slots themselves where these are given.
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`, increased in place.
    pub(crate) lengths: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) next: IntTensor<B>,
    /// `[S]`, written in place.
    pub(crate) log_norms: FloatTensor<B>,
    pub(crate) place: PlacementKind,
}

/// The results of writing new tokens.
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
