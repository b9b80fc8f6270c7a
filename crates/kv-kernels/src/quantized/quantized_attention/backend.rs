//! The backend trait of `quantized_attention`, and its implementations for CubeCL devices and the
//! CPU.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::QuantizedAttentionArgs;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait QuantizedAttentionOps: Backend {
    /// Returns the output `[B, Hq, D]` and the log-sum-exp `[B, Hq]` over all slots.
    fn quantized_attention(
        #[extension_type] args: QuantizedAttentionArgs<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

#[cfg(feature = "gpu")]
impl QuantizedAttentionOps for CubeBackend {
    fn quantized_attention(
        args: QuantizedAttentionArgs<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{DType, Flex};
    use burn_flex::FlexTensor;

    use super::QuantizedAttentionOps;
    use crate::attention::continued::reference::State;
    use crate::backend::host_buffers::{dims, rounded, slice, wide};
    use crate::quantized::quantized_attention::args::QuantizedAttentionArgs;
    use crate::quantized::quantized_attention::reference::CodedSlots;

    impl QuantizedAttentionOps for Flex {
        fn quantized_attention(args: QuantizedAttentionArgs<Self>) -> (FlexTensor, FlexTensor) {
            let [batch, query_heads, head_dim] = dims(&args.query);
            let [_, kv_heads] = dims(&args.offsets);
            let group = query_heads / kv_heads;
            let dtype = args.query.dtype();
            let [key_codes, key_scales] =
                [args.pool.key_codes, args.pool.key_scales].map(|codes| codes.to_contiguous());
            let [value_codes, value_scales] =
                [args.pool.value_codes, args.pool.value_scales].map(|codes| codes.to_contiguous());
            let slots = CodedSlots {
                key_codes: slice(&key_codes),
                key_scales: slice(&key_scales),
                value_codes: slice(&value_codes),
                value_scales: slice(&value_scales),
                bits: args.pool.bits,
                head_dim,
            };
            let (query, mut output) = (wide(&args.query), wide(&args.output).into_vec());
            let mut log_sum_exp = wide(&args.log_sum_exp).into_vec();
            let [offsets, lengths] = [args.offsets, args.lengths].map(|t| t.to_contiguous());
            let (offsets, lengths) = (slice::<i32>(&offsets), slice::<i32>(&lengths));
            for range in 0..batch * kv_heads {
                let heads = range * group..(range + 1) * group;
                let numbers = heads.start * head_dim..heads.end * head_dim;
                let first = offsets[range].max(0) as usize;
                let end = first + lengths[range].max(0) as usize;
                let before =
                    output[numbers.clone()].chunks(head_dim).zip(&log_sum_exp[heads.clone()]);
                let mut states: Vec<State> =
                    before.map(|(output, sum)| State::of(output, *sum)).collect();
                slots.attend(&query[numbers], args.scale, first..end, &mut states);
                for (head, state) in heads.zip(states) {
                    let (own, sum) = state.finish();
                    output[head * head_dim..(head + 1) * head_dim].copy_from_slice(&own);
                    log_sum_exp[head] = sum;
                }
            }
            (
                rounded(output, [batch, query_heads, head_dim], dtype),
                rounded(log_sum_exp, [batch, query_heads], DType::F32),
            )
        }
    }
}
