//! A layer's own work: products, norms, heads, and the tokens that are drawn.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

use super::SlotPools;
use crate::heads::{HeadConfig, Place};
use crate::sample::DrawConfig;

/// New tokens as projected; what `config` does not use is any tensor.
#[derive(ExtensionType)]
pub(crate) struct Projection<B: Backend> {
    /// `[N, (Hq + 2 Hkv) D]`
    pub(crate) projected: FloatTensor<B>,
    /// `[N]`
    pub(crate) positions: IntTensor<B>,
    /// `[P, D / 2]`
    pub(crate) cos: FloatTensor<B>,
    /// `[P, D / 2]`
    pub(crate) sin: FloatTensor<B>,
    /// `[D]`
    pub(crate) query_norm: FloatTensor<B>,
    /// `[D]`
    pub(crate) key_norm: FloatTensor<B>,
    pub(crate) config: HeadConfig,
}

/// Where new tokens go; what `place` does not use is any tensor.
#[derive(ExtensionType)]
pub(crate) struct Places<B: Backend> {
    /// `[B, Hkv]`; the slots themselves where they are given.
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`, grown in place.
    pub(crate) lengths: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) next: IntTensor<B>,
    /// `[S]`, written in place.
    pub(crate) log_norms: FloatTensor<B>,
    pub(crate) place: Place,
}

/// What writing new tokens returns.
#[derive(ExtensionType)]
pub(crate) struct Written<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) query: FloatTensor<B>,
    #[extension_type]
    pub(crate) pools: SlotPools<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[S]`
    pub(crate) log_norms: FloatTensor<B>,
}

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

/// What a product adds to its sums; what is not used is any tensor.
#[derive(ExtensionType)]
pub(crate) struct Epilogue<B: Backend> {
    /// `[M]`
    pub(crate) bias: FloatTensor<B>,
    /// `[N, M]`, or `[N, M / 2]` where `gated`.
    pub(crate) residual: FloatTensor<B>,
    pub(crate) config: EpilogueConfig,
}

/// An [`Epilogue`] without its tensors: bias first, then the gate, then the residual.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct EpilogueConfig {
    pub(crate) biased: bool,
    /// Whether `silu` of the first half of the outputs multiplies the second.
    pub(crate) gated: bool,
    pub(crate) adds: bool,
}

impl EpilogueConfig {
    /// Outputs of the weight matrix that make one output.
    pub(crate) fn parts(self) -> usize {
        if self.gated { 2 } else { 1 }
    }
}

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait LayerOps: Backend {
    /// `x` `[N, K]` times the transpose of `weight` `[M, K]`, for few rows.
    fn skinny_product(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] epilogue: Epilogue<Self>,
    ) -> FloatTensor<Self>;

    /// `silu` of the left half of `[N, 2 I]` times the right one.
    fn swiglu(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// `x` (plus `delta`, where `adds`) with normalised rows, and the sum, else any tensor.
    fn rms_norm(
        x: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f32,
        adds: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Queries, keys and values `[B, H, T, D]` of `tokens` tokens a sequence.
    fn split_heads(
        #[extension_type] projection: Projection<Self>,
        tokens: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// Writes one token a sequence in place.
    fn write_heads(
        #[extension_type] projection: Projection<Self>,
        #[extension_type] pools: SlotPools<Self>,
        #[extension_type] places: Places<Self>,
    ) -> Written<Self>;

    /// Draws a token for every row of `logits` `[B, V]`.
    fn draw(
        logits: FloatTensor<Self>,
        #[extension_type] state: SampleTensors<Self>,
        config: DrawConfig,
    ) -> Drawn<Self>;

    /// A number in `[0, 1)` for each of `seeds` `[N, 2]` and `draws` `[N]`.
    fn uniforms(seeds: IntTensor<Self>, draws: IntTensor<Self>) -> FloatTensor<Self>;
}
