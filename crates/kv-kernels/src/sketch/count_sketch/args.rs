//! The arguments and results of the ops on count-sketches as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::SketchConfig;

/// The tensors of sketches ([`crate::SketchSource`]).
#[derive(ExtensionType)]
pub(crate) struct SketchTensors<B: Backend> {
    /// `[N, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[N, D]`
    pub(crate) values: FloatTensor<B>,
    /// `[P, 6]`
    pub(crate) heads: IntTensor<B>,
    /// `[P, r * 4]`, or a table `[1, r * T]`.
    pub(crate) hashes: IntTensor<B>,
    pub(crate) most_entries: usize,
    pub(crate) config: SketchConfig,
}

/// The tokens to add to sketches.
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
    /// The factor of each token.
    pub(crate) sign: f32,
}
