//! The backend trait of `prefill_attention` on Hopper GPUs. Elsewhere the op consists of tensor
//! operations.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use burn_cubecl::CubeBackend;

use super::PrefillConfig;

#[backend_extension(Cube)]
pub(crate) trait PrefillAttentionOps: Backend {
    /// Causal attention of `query` `[B, Hq, N, D]` over keys and values `[B, Hkv, T, D]`; the last
    /// query is at the last key. Returns output, log-sum-exp `[B, Hq, N]` and, where asked for,
    /// column sums `[B, Hq, T]`.
    fn causal_attention(
        query: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        config: PrefillConfig,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

impl PrefillAttentionOps for CubeBackend {
    fn causal_attention(
        query: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        config: PrefillConfig,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        super::launch::causal(query, keys, values, config)
    }
}
