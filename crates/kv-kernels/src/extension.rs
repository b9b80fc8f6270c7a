//! The backend extension: one method an op, implemented for the CPU (`flex.rs`) by the references
//! and for CubeCL devices (`gpu.rs`) by the kernels. Public functions validate first; an
//! implementation may rely on shapes, dtypes and devices.

use burn::backend::Backend;
use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Dispatch, backend_extension};

use crate::decode_attention::DecodeConfig;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait SlotOps: Backend {
    /// Returns output `[B, Hq, D]`, log-sum-exp `[B, Hq]` and probabilities `[S, G]`; the last two
    /// are placeholders of one element where `config` does not ask for them.
    #[allow(clippy::too_many_arguments)]
    fn decode_attention(
        query: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        log_weights: FloatTensor<Self>,
        numerators: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        view: IntTensor<Self>,
        config: DecodeConfig,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// `x` `[N, K]` times the transpose of `weight` `[M, K]`, for few rows.
    fn skinny_product(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Writes row `n` of `rows` `[N, D]` into row `slots[n]` of `pool` `[S, D]`, in place.
    fn scatter_rows(
        pool: FloatTensor<Self>,
        slots: IntTensor<Self>,
        rows: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// The same for a pool of integers `[S]`.
    fn scatter_ints(
        pool: IntTensor<Self>,
        slots: IntTensor<Self>,
        values: IntTensor<Self>,
    ) -> IntTensor<Self>;

    /// The slot of each range's lowest score; `-1` for an empty range.
    fn argmin_slots(
        scores: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
    ) -> IntTensor<Self>;
}

/// Kernels for Hopper GPUs alone; [`crate::check::Check::on_hopper`] says where they serve.
#[cfg(feature = "cuda")]
#[backend_extension(Cube)]
pub(crate) trait HopperOps: Backend {
    /// `x` `[N, K]` times the transpose of `weight` `[M, K]`, in f16 or bf16.
    fn wide_product(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Causal attention of `query` `[B, Hq, N, D]` over `[B, Hkv, T, D]`, the last query at the last
    /// key; returns output and log-sum-exp `[B, Hq, N]`.
    fn causal_attention(
        query: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        scale: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
