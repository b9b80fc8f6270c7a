//! The arguments and results of the ops on count-sketches as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::SketchConfig;

/// Sketches, as [`crate::SketchSource`] has them.
#[derive(ExtensionType)]
pub(crate) struct SketchTensors<B: Backend> {
    /// `[N, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[N, D]`
    pub(crate) values: FloatTensor<B>,
    /// `[P, 6]`
    pub(crate) heads: IntTensor<B>,
    /// `[P, r * 4]`, or `[1, r * T]` where they are tabled.
    pub(crate) hashes: IntTensor<B>,
    pub(crate) most_entries: usize,
    pub(crate) config: SketchConfig,
}

/// Tokens that go into sketches.
#[derive(ExtensionType)]
pub(crate) struct InsertArgs<B: Backend> {
    #[extension_type]
    pub(crate) sketch: SketchTensors<B>,
    /// `[P, M]`
    pub(crate) tokens: IntTensor<B>,
    /// `[P, M, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[P, M, D]`
    pub(crate) values: FloatTensor<B>,
    /// How often each is added.
    pub(crate) sign: f32,
}
