//! The arguments and results of `balance` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::WalkConfig;
use crate::backend::optional::OptionalFloat;

/// The arguments of `balance`.
#[derive(ExtensionType)]
pub(crate) struct BalanceArgs<B: Backend> {
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`
    #[extension_type]
    pub(crate) values: OptionalFloat<B>,
    /// `[P, N]`
    pub(crate) lists: IntTensor<B>,
    /// `[P]`
    pub(crate) counts: IntTensor<B>,
    /// `[P]`
    pub(crate) log_gamma: FloatTensor<B>,
    #[extension_type]
    pub(crate) centre: CentreArgs<B>,
    /// `[P, N]`
    #[extension_type]
    pub(crate) weights: OptionalFloat<B>,
    #[extension_type]
    pub(crate) draws: DrawArgs<B>,
    pub(crate) config: WalkConfig,
}

/// [`crate::Centre`] as backends take it.
#[derive(ExtensionType)]
pub(crate) enum CentreArgs<B: Backend> {
    None,
    List,
    /// `[P, blocks, D]`
    Block(FloatTensor<B>),
}

/// [`crate::Draws`] as backends take them.
#[derive(ExtensionType)]
pub(crate) enum DrawArgs<B: Backend> {
    /// `[P, 2]`
    Seeds(IntTensor<B>),
    /// `[P, N]`
    Numbers(FloatTensor<B>),
}

/// The results of `balance`, as in [`crate::Balanced`].
#[derive(ExtensionType)]
pub(crate) struct Classes<B: Backend> {
    pub(crate) signs: IntTensor<B>,
    pub(crate) kept: IntTensor<B>,
    pub(crate) failed: IntTensor<B>,
}
