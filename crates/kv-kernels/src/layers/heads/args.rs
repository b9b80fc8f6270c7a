//! The arguments and results of the ops on heads as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::{HeadConfig, PlacementKind};
use crate::backend::optional::{OptionalFloat, OptionalInt};
use crate::slots::pool::SlotPools;

/// The projections of new tokens.
#[derive(ExtensionType)]
pub(crate) struct Projection<B: Backend> {
    /// `[N, (Hq + 2 Hkv) D]`
    pub(crate) projected: FloatTensor<B>,
    /// `[N]`
    pub(crate) positions: IntTensor<B>,
    /// `[P, D / 2]`, where keys and queries are rotated.
    #[extension_type]
    pub(crate) cos: OptionalFloat<B>,
    /// `[P, D / 2]`, where keys and queries are rotated.
    #[extension_type]
    pub(crate) sin: OptionalFloat<B>,
    /// `[D]`, where keys and queries are normalised.
    #[extension_type]
    pub(crate) query_norm: OptionalFloat<B>,
    /// `[D]`, where keys and queries are normalised.
    #[extension_type]
    pub(crate) key_norm: OptionalFloat<B>,
    pub(crate) config: HeadConfig,
}

/// The slots of new tokens.
#[derive(ExtensionType)]
pub(crate) struct PlacementArgs<B: Backend> {
    /// `[B, Hkv]`; the slots themselves where these are given.
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`, increased in place.
    pub(crate) lengths: IntTensor<B>,
    /// `[B, Hkv]`, where places are given.
    #[extension_type]
    pub(crate) next: OptionalInt<B>,
    /// `[S]`, written in place, where places are given.
    #[extension_type]
    pub(crate) log_norms: OptionalFloat<B>,
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
    #[extension_type]
    pub(crate) log_norms: OptionalFloat<B>,
}
