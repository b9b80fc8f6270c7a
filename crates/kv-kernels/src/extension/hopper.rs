//! What Hopper GPUs alone do.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

use super::Epilogue;
use crate::prefill_attention::PrefillConfig;

#[backend_extension(Cube)]
pub(crate) trait HopperOps: Backend {
    /// [`SlotOps::skinny_product`] in f16 or bf16; where there is an `epsilon`, of normalised rows
    /// times `gain` `[K]`.
    fn streamed_product(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        epsilon: Option<f32>,
        #[extension_type] epilogue: Epilogue<Self>,
    ) -> FloatTensor<Self>;

    /// `x` `[N, K]` times the transpose of `weight` `[M, K]`, in f16 or bf16.
    fn wide_product(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Causal attention of `query` `[B, Hq, N, D]` over `[B, Hkv, T, D]`, the last query at the
    /// last key; returns output, log-sum-exp `[B, Hq, N]` and, where asked for, column sums `[B,
    /// Hq, T]`.
    fn causal_attention(
        query: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        config: PrefillConfig,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}
