//! The arguments and results of `argmin_slots` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::Protection;
use crate::backend::optional::OptionalInt;

/// The scores to compare, and the tokens to protect.
#[derive(ExtensionType)]
pub(crate) struct ArgminSlotsArgs<B: Backend> {
    /// `[S]`
    pub(crate) scores: FloatTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// Logical positions, `[S]`, where tokens are protected.
    #[extension_type]
    pub(crate) positions: OptionalInt<B>,
    /// Each sequence's newest position, `[B]`, where tokens are protected.
    #[extension_type]
    pub(crate) newest: OptionalInt<B>,
    pub(crate) protection: Option<Protection>,
}
