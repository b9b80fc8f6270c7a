//! The backend trait of `prefill_attention`, and its implementations for Hopper GPUs and the CPU.
//! On other devices the op consists of tensor operations.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "cuda")]
use burn_cubecl::CubeBackend;

use super::PrefillConfig;

#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"))]
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

#[cfg(feature = "cuda")]
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

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU.

    use burn::backend::{DType, Flex};
    use burn_flex::FlexTensor;

    use super::PrefillAttentionOps;
    use crate::attention::prefill::vectorised::{Attended, Prompt};
    use crate::attention::prefill::{Mask, PrefillConfig};
    use crate::backend::host_buffers::{dims, rounded, wide};

    impl PrefillAttentionOps for Flex {
        fn causal_attention(
            query: FlexTensor,
            keys: FlexTensor,
            values: FlexTensor,
            config: PrefillConfig,
        ) -> (FlexTensor, FlexTensor, FlexTensor) {
            let [batch, heads, queries, head_dim] = dims(&query);
            let [_, kv_heads, tokens, _] = dims(&keys);
            let PrefillConfig { window, sinks, counted, .. } = config;
            let Attended { output, log_sum_exp, column_sums } = Prompt {
                query: &wide(&query),
                keys: &wide(&keys),
                values: &wide(&values),
                queries,
                tokens,
                group: heads / kv_heads,
                head_dim,
                scale: config.scale,
                mask: Mask { window, sinks: sinks as usize },
                counted: counted.unwrap_or(0) as usize,
            }
            .attend();
            (
                rounded(output, query.layout().shape().clone(), query.dtype()),
                rounded(log_sum_exp, [batch, heads, queries], DType::F32),
                rounded(column_sums, [batch, heads, tokens], DType::F32),
            )
        }
    }
}
