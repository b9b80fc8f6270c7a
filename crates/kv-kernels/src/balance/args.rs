//! The arguments and results of `balance` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::WalkConfig;

/// The arguments of `balance`. A tensor that the configuration does not use may be any tensor.
#[derive(ExtensionType)]
pub(crate) struct BalanceArgs<B: Backend> {
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) values: FloatTensor<B>,
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
    pub(crate) config: WalkConfig,
}

/// The results of `balance`, as in [`crate::Balanced`].
#[derive(ExtensionType)]
pub(crate) struct Classes<B: Backend> {
    pub(crate) signs: IntTensor<B>,
    pub(crate) kept: IntTensor<B>,
    pub(crate) failed: IntTensor<B>,
}
