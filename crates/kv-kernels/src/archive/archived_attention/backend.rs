//! The backend trait of `archived_attention`, and its implementations for CubeCL devices and the
//! CPU.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::ArchivedAttentionArgs;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait ArchivedAttentionOps: Backend {
    /// Returns the output `[B, Hq, D]` and the log-sum-exp `[B, Hq]` over all slots.
    fn archived_attention(
        #[extension_type] args: ArchivedAttentionArgs<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

#[cfg(feature = "gpu")]
impl ArchivedAttentionOps for CubeBackend {
    fn archived_attention(
        args: ArchivedAttentionArgs<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{DType, Flex};
    use burn_flex::FlexTensor;

    use super::ArchivedAttentionOps;
    use crate::archive::archived_attention::args::ArchivedAttentionArgs;
    use crate::archive::archived_attention::reference::ArchivedSlots;
    use crate::attention::continued::reference::State;
    use crate::backend::host_buffers::{dims, rounded, slice, wide};

    impl ArchivedAttentionOps for Flex {
        fn archived_attention(args: ArchivedAttentionArgs<Self>) -> (FlexTensor, FlexTensor) {
            let [batch, query_heads, head_dim] = dims(&args.query);
            let dtype = args.query.dtype();
            let pool = args.pool;
            let [rows, statistics, means] =
                [pool.rows.tensor, pool.key_statistics, pool.value_means]
                    .map(|tensor| tensor.to_contiguous());
            let slots = ArchivedSlots {
                rows: slice(&rows),
                key_statistics: slice(&statistics),
                value_means: slice(&means),
                head_dim,
                dtype,
                scale: args.scale,
            };
            let (query, mut output) = (wide(&args.query), wide(&args.output).into_vec());
            let mut log_sum_exp = wide(&args.log_sum_exp).into_vec();
            let chosen = args.chosen.into_option().zip(args.counts.into_option());
            let chosen = chosen.map(|(chosen, counts)| {
                (dims::<2>(&chosen)[1], chosen.to_contiguous(), counts.to_contiguous())
            });
            let chosen = |range: usize| match &chosen {
                None => &[][..],
                Some((most, chosen, counts)) => {
                    let count = slice::<i32>(counts)[range].max(0) as usize;
                    &slice::<i32>(chosen)[range * most..][..count]
                }
            };
            let [offsets, lengths] =
                [args.offsets, args.lengths].map(|tensor| tensor.to_contiguous());
            let (offsets, lengths) = (slice::<i32>(&offsets), slice::<i32>(&lengths));
            let group = log_sum_exp.len() / offsets.len();
            let heads = query.chunks(head_dim).zip(output.chunks_mut(head_dim));
            for (head, ((query, output), log_sum_exp)) in heads.zip(&mut log_sum_exp).enumerate() {
                let range = head / group;
                let first = offsets[range].max(0) as usize;
                let length = lengths[range].max(0) as usize;
                let mut state = State::of(output, *log_sum_exp);
                slots.attend(query, first..first + length, chosen(range), &mut state);
                let (own, sum) = state.finish();
                output.copy_from_slice(&own);
                *log_sum_exp = sum;
            }
            (
                rounded(output, [batch, query_heads, head_dim], dtype),
                rounded(log_sum_exp, [batch, query_heads], DType::F32),
            )
        }
    }
}
