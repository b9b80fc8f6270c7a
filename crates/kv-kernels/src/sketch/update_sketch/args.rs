//! The arguments and results of `update_sketch` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::SketchUpdateOptions;
use crate::backend::optional::OptionalFloat;
use crate::sketch::count_sketch::args::SketchTensors;
use crate::slots::pool::SlotPools;

/// The arguments of [`crate::update_sketch`].
#[derive(ExtensionType)]
pub(crate) struct SketchUpdateArgs<B: Backend> {
    #[extension_type]
    pub(crate) sketch: SketchTensors<B>,
    #[extension_type]
    pub(crate) pool: SlotPools<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[S]`
    pub(crate) slot_scores: FloatTensor<B>,
    /// `[T]`
    pub(crate) token_scores: FloatTensor<B>,
    /// `[P, 2]`
    pub(crate) moved: IntTensor<B>,
    /// `[S, G]`, where they do not lie among the tokens' logits.
    #[extension_type]
    pub(crate) slot_logits: OptionalFloat<B>,
    /// `[T, G]`
    pub(crate) token_logits: FloatTensor<B>,
    /// `[B, Hq]`
    pub(crate) log_sum_exp: FloatTensor<B>,
    /// `[B]`
    pub(crate) newest: IntTensor<B>,
    pub(crate) options: SketchUpdateOptions,
}

/// The tensors that an update has changed in place.
#[derive(ExtensionType)]
pub(crate) struct UpdatedSketch<B: Backend> {
    #[extension_type]
    pub(crate) sketch: SketchTensors<B>,
    #[extension_type]
    pub(crate) pool: SlotPools<B>,
    pub(crate) lengths: IntTensor<B>,
    pub(crate) slot_scores: FloatTensor<B>,
    pub(crate) token_scores: FloatTensor<B>,
    pub(crate) moved: IntTensor<B>,
}
