//! The arguments and results of `sketch_attention` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::SketchStrategy;
use crate::sketch::count_sketch::args::SketchTensors;

/// The arguments of attention over slots and sketched tokens.
#[derive(ExtensionType)]
pub(crate) struct SketchAttentionArgs<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) query: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) values: FloatTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    #[extension_type]
    pub(crate) sketch: SketchTensors<B>,
    /// `[T]`
    pub(crate) scores: FloatTensor<B>,
    /// `[B]`
    pub(crate) newest: IntTensor<B>,
    pub(crate) scale: f32,
    /// The most slots of a range.
    pub(crate) longest: usize,
    /// The most tokens that a range's sketch has room for.
    pub(crate) longest_tokens: usize,
    pub(crate) strategy: SketchStrategy,
}

/// The results of attention over slots and sketched tokens.
#[derive(ExtensionType)]
pub(crate) struct SketchAttended<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) output: FloatTensor<B>,
    /// `[B, Hq]`
    pub(crate) log_sum_exp: FloatTensor<B>,
    /// `[S, G]`
    pub(crate) slot_logits: FloatTensor<B>,
    /// `[T, G]`
    pub(crate) token_logits: FloatTensor<B>,
}
