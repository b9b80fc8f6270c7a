//! The arguments and results of `argmin_slots` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::Protection;

/// The scores to compare, and the tokens to protect.
#[derive(ExtensionType)]
pub(crate) struct ArgminSlotsArgs<B: Backend> {
    /// `[S]`
    pub(crate) scores: FloatTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// Logical positions, `[S]`; read where tokens are protected.
    pub(crate) positions: IntTensor<B>,
    /// Each sequence's newest position, `[B]`; read where tokens are protected.
    pub(crate) newest: IntTensor<B>,
    pub(crate) protection: Option<Protection>,
}
