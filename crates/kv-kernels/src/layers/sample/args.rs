//! The arguments and results of `draw` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

/// The draws of a batch: settings, and the numbers that a draw changes in place.
#[derive(ExtensionType)]
pub(crate) struct SampleTensors<B: Backend> {
    /// Temperature, top p, min p, `[B * 3]`.
    pub(crate) floats: FloatTensor<B>,
    /// Top k, seed (two numbers), and whether positions advance, `[B * 4]`.
    pub(crate) ints: IntTensor<B>,
    /// `[B]`
    pub(crate) draws: IntTensor<B>,
    /// `[B]`
    pub(crate) positions: IntTensor<B>,
    /// `[B]`
    pub(crate) tokens: IntTensor<B>,
}

/// The results of a draw, `[B]` each.
#[derive(ExtensionType)]
pub(crate) struct Drawn<B: Backend> {
    pub(crate) drawn: IntTensor<B>,
    pub(crate) draws: IntTensor<B>,
    pub(crate) positions: IntTensor<B>,
    pub(crate) tokens: IntTensor<B>,
}
