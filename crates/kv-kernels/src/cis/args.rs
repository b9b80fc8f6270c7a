//! The arguments and results of the ops on index sets as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::CisConfig;

/// The arguments of [`crate::cis_select`] as backends take them. `P` is `B * Hkv`, the head ranges.
#[derive(ExtensionType)]
pub(crate) struct Retrieval<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) query: FloatTensor<B>,
    /// `[P, parts, length]`
    pub(crate) vectors: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[B]`
    pub(crate) newest: IntTensor<B>,
    /// `[P, row]`
    pub(crate) table: IntTensor<B>,
    /// `[P, sets, parts, length]`
    pub(crate) set_vectors: FloatTensor<B>,
    pub(crate) config: CisConfig,
}
