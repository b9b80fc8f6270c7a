//! The backend trait of the ops that add probabilities, and its implementations for CubeCL devices
//! and the CPU.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::ProbabilityArgs;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait AddProbabilitiesOps: Backend {
    /// Adds probabilities to the sums, in place.
    fn add_probabilities(#[extension_type] args: ProbabilityArgs<Self>) -> FloatTensor<Self>;

    /// Adds probabilities times norms `[S]` of values `[S, D]`, in place. Returns sums and norms.
    /// The norms of ranges' last slots are computed anew.
    fn add_contributions(
        #[extension_type] args: ProbabilityArgs<Self>,
        norms: FloatTensor<Self>,
        values: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

#[cfg(feature = "gpu")]
impl AddProbabilitiesOps for CubeBackend {
    fn add_probabilities(args: ProbabilityArgs<Self>) -> FloatTensor<Self> {
        super::launch::run(args)
    }

    fn add_contributions(
        args: ProbabilityArgs<Self>,
        norms: FloatTensor<Self>,
        values: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        super::launch::run_weighed(args, norms, values)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::Flex;
    use burn_flex::FlexTensor;

    use super::AddProbabilitiesOps;
    use crate::backend::host_buffers::{owned, slice, slice_mut, wide};
    use crate::slots::add_probabilities::args::ProbabilityArgs;
    use crate::slots::add_probabilities::reference::Probabilities;

    impl AddProbabilitiesOps for Flex {
        fn add_probabilities(args: ProbabilityArgs<Self>) -> FlexTensor {
            let ProbabilityArgs { sums, logits, log_sum_exp, offsets, lengths, reduction } = args;
            let mut sums = owned(sums);
            let [logits, log_sum_exp, offsets, lengths] =
                [logits, log_sum_exp, offsets, lengths].map(|tensor| tensor.to_contiguous());
            let probabilities = Probabilities {
                logits: slice(&logits),
                log_sum_exp: slice(&log_sum_exp),
                offsets: slice(&offsets),
                lengths: slice(&lengths),
                reduction,
            };
            let written = slice_mut::<f32>(&mut sums);
            probabilities.each(|slot, own, _| written[slot] += own);
            sums
        }

        fn add_contributions(
            args: ProbabilityArgs<Self>,
            norms: FlexTensor,
            values: FlexTensor,
        ) -> (FlexTensor, FlexTensor) {
            let ProbabilityArgs { sums, logits, log_sum_exp, offsets, lengths, reduction } = args;
            let (mut sums, mut norms) = (owned(sums), owned(norms));
            let [logits, log_sum_exp, offsets, lengths] =
                [logits, log_sum_exp, offsets, lengths].map(|tensor| tensor.to_contiguous());
            let [_, head_dim] = values.layout().shape().dims();
            let values = wide(&values);
            let probabilities = Probabilities {
                logits: slice(&logits),
                log_sum_exp: slice(&log_sum_exp),
                offsets: slice(&offsets),
                lengths: slice(&lengths),
                reduction,
            };
            let (written, known) = (slice_mut::<f32>(&mut sums), slice_mut::<f32>(&mut norms));
            probabilities.each(|slot, own, last| {
                if last {
                    let value = &values[slot * head_dim..][..head_dim];
                    known[slot] = value.iter().map(|x| x.abs()).sum();
                }
                written[slot] += own * known[slot];
            });
            (sums, norms)
        }
    }
}
