//! The backend trait of the ops on index sets, and its implementations for CubeCL devices and the
//! CPU.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::SteerOptions;
use super::args::Retrieval;
use crate::attention::decode::DecodeConfig;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait CisOps: Backend {
    /// Chooses the slots that a step attends to. Changes the table and the vectors of the sets in
    /// place; returns them, and log-sum-exps `[P, G]`.
    fn cis_select(
        #[extension_type] retrieval: Retrieval<Self>,
    ) -> (IntTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// Chooses as [`Self::cis_select`] does, and attends to the chosen slots. Returns the table,
    /// the vectors, and the attention output `[B, Hq, D]`.
    fn cis_attention(
        #[extension_type] retrieval: Retrieval<Self>,
        values: FloatTensor<Self>,
        attention: DecodeConfig,
    ) -> (IntTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// Changes the sizes of sets in their table `[P, row]`, in place. `dropped` `[P, G]` is the
    /// share of attention that the step did not give to the slots that it read.
    fn steer_sets(
        table: IntTensor<Self>,
        dropped: FloatTensor<Self>,
        options: SteerOptions,
    ) -> IntTensor<Self>;
}

#[cfg(feature = "gpu")]
impl CisOps for CubeBackend {
    fn cis_select(
        retrieval: Retrieval<Self>,
    ) -> (IntTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        super::launch::run(retrieval)
    }

    fn cis_attention(
        retrieval: Retrieval<Self>,
        values: FloatTensor<Self>,
        attention: DecodeConfig,
    ) -> (IntTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        super::fused::run(retrieval, values, attention)
    }

    fn steer_sets(
        table: IntTensor<Self>,
        dropped: FloatTensor<Self>,
        options: SteerOptions,
    ) -> IntTensor<Self> {
        super::steer::steer(table, dropped, options)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{DType, Flex};
    use burn_flex::FlexTensor;

    use super::CisOps;
    use crate::attention::decode::DecodeConfig;
    use crate::attention::decode::args::DecodeArgs;
    use crate::attention::decode::backend::DecodeAttentionOps;
    use crate::backend::host_buffers::{owned, rounded, slice, slice_mut, wide};
    use crate::backend::optional::{OptionalFloat, OptionalInt};
    use crate::cis::args::Retrieval;
    use crate::cis::{SteerOptions, reference, steer};

    impl CisOps for Flex {
        fn cis_select(retrieval: Retrieval<Self>) -> (FlexTensor, FlexTensor, FlexTensor) {
            let Retrieval { config, .. } = retrieval;
            let [total_kv_heads, parts, _] = retrieval.vectors.layout().shape().dims();
            let [_, head_dim] = retrieval.keys.layout().shape().dims();
            let [query, vectors, keys] =
                [&retrieval.query, &retrieval.vectors, &retrieval.keys].map(wide);
            let ints = [retrieval.offsets, retrieval.lengths, retrieval.newest]
                .map(|tensor| tensor.to_contiguous());
            let (mut table, mut set_vectors) =
                (owned(retrieval.table), owned(retrieval.set_vectors));
            let problem = reference::Problem {
                query: &query,
                vectors: &vectors,
                parts,
                keys: &keys,
                head_dim,
                offsets: slice(&ints[0]),
                lengths: slice(&ints[1]),
                newest: slice(&ints[2]),
                config,
            };
            let sums =
                problem.solve(slice_mut::<i32>(&mut table), slice_mut::<f32>(&mut set_vectors));
            let group = sums.len() / total_kv_heads;
            (table, set_vectors, rounded(sums, [total_kv_heads, group], DType::F32))
        }

        fn cis_attention(
            retrieval: Retrieval<Self>,
            values: FlexTensor,
            attention: DecodeConfig,
        ) -> (FlexTensor, FlexTensor, FlexTensor) {
            let [query, keys] = [&retrieval.query, &retrieval.keys].map(Clone::clone);
            let [offsets, lengths] = [&retrieval.offsets, &retrieval.lengths].map(Clone::clone);
            let (table, set_vectors, _) = Self::cis_select(retrieval);
            let attended = Self::decode_attention(DecodeArgs {
                query,
                keys,
                values,
                log_weights: OptionalFloat::Absent,
                numerators: OptionalFloat::Absent,
                offsets,
                lengths,
                view: OptionalInt::Present(table.clone()),
                config: attention,
            });
            (table, set_vectors, attended.output)
        }

        fn steer_sets(table: FlexTensor, dropped: FlexTensor, options: SteerOptions) -> FlexTensor {
            let (mut table, dropped) = (owned(table), wide(&dropped));
            let [total_kv_heads, _] = table.layout().shape().dims();
            steer::reference(slice_mut::<i32>(&mut table), &dropped, total_kv_heads, options);
            table
        }
    }
}
