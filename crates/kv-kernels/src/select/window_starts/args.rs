//! The arguments and results of `window_starts` as backends take and return them.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, ExtensionType};

use crate::Share;

/// The ranges and positions in which windows start.
#[derive(ExtensionType)]
pub(crate) struct WindowStartsArgs<B: Backend> {
    /// `[S]`
    pub(crate) positions: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// Positions of the newest tokens, `[B]`.
    pub(crate) newest: IntTensor<B>,
    pub(crate) share: Share,
}
