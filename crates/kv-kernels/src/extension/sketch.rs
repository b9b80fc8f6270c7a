//! Count-sketches of tokens.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, DType, ExtensionType, backend_extension};

use super::SlotPools;
use crate::count_sketch::SketchConfig;
use crate::revise_sketch::ReviseOptions;

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

/// Tokens in sketches, as [`crate::SketchedTokens`] has them.
#[derive(ExtensionType)]
pub(crate) struct SketchTokens<B: Backend> {
    #[extension_type]
    pub(crate) sketch: SketchTensors<B>,
    /// `[T]`
    pub(crate) scores: FloatTensor<B>,
    /// `[B]`
    pub(crate) newest: IntTensor<B>,
    pub(crate) longest: usize,
}

/// What attention over slots and sketched tokens returns.
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

/// A step's end for slots and sketches, as [`crate::revise_sketch`] takes it.
#[derive(ExtensionType)]
pub(crate) struct Revision<B: Backend> {
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
    /// `[S, G]`; `[T, G]` where `by_token`.
    pub(crate) slot_logits: FloatTensor<B>,
    /// `[T, G]`
    pub(crate) token_logits: FloatTensor<B>,
    /// `[B, Hq]`
    pub(crate) log_sum_exp: FloatTensor<B>,
    /// `[B]`
    pub(crate) newest: IntTensor<B>,
    pub(crate) by_token: bool,
    pub(crate) options: ReviseOptions,
}

/// What a revision has changed in place.
#[derive(ExtensionType)]
pub(crate) struct Revised<B: Backend> {
    #[extension_type]
    pub(crate) sketch: SketchTensors<B>,
    #[extension_type]
    pub(crate) pool: SlotPools<B>,
    pub(crate) lengths: IntTensor<B>,
    pub(crate) slot_scores: FloatTensor<B>,
    pub(crate) token_scores: FloatTensor<B>,
    pub(crate) moved: IntTensor<B>,
}

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait SketchOps: Backend {
    /// Adds tokens `[P, M]`, `sign` times each, to sketches, in place; returns their keys and
    /// values.
    fn sketch_insert(
        #[extension_type] sketch: SketchTensors<Self>,
        tokens: IntTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        sign: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Estimated keys and values `[P, M, D]` of tokens `[P, M]`.
    fn sketch_query(
        #[extension_type] sketch: SketchTensors<Self>,
        tokens: IntTensor<Self>,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Attention over slots and over tokens in sketches.
    #[allow(clippy::too_many_arguments)]
    fn sketch_attention(
        query: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        #[extension_type] tokens: SketchTokens<Self>,
        scale: f32,
        longest: usize,
    ) -> SketchAttended<Self>;

    /// Adds a step's probabilities to scores and moves tokens between slots and sketches, in place.
    fn revise_sketch(#[extension_type] revision: Revision<Self>) -> Revised<Self>;
}
