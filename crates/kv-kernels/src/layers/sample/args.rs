//! The arguments and results of `draw` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

/// A batch's draws: settings, and what is changed in place.
#[derive(ExtensionType)]
pub(crate) struct SampleTensors<B: Backend> {
    /// Temperature, top p, min p, `[B * 3]`.
    pub(crate) floats: FloatTensor<B>,
    /// Top k, seed (two), whether positions advance, `[B * 4]`.
    pub(crate) ints: IntTensor<B>,
    /// `[B]`
    pub(crate) draws: IntTensor<B>,
    /// `[B]`
    pub(crate) positions: IntTensor<B>,
    /// `[B]`
    pub(crate) tokens: IntTensor<B>,
}

/// What a draw returns, `[B]` each.
#[derive(ExtensionType)]
pub(crate) struct Drawn<B: Backend> {
    pub(crate) drawn: IntTensor<B>,
    pub(crate) draws: IntTensor<B>,
    pub(crate) positions: IntTensor<B>,
    pub(crate) tokens: IntTensor<B>,
}
