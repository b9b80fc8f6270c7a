//! The backend trait of `average_scores`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::AverageScoresArgs;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait AverageScoresOps: Backend {
    /// Adds scores, which are made of logits, to the averages in place. Returns `log_scores` and
    /// `log_samples`.
    fn average_scores(
        #[extension_type] args: AverageScoresArgs<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

#[cfg(feature = "gpu")]
impl AverageScoresOps for CubeBackend {
    fn average_scores(args: AverageScoresArgs<Self>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::Flex;
    use burn_flex::FlexTensor;

    use super::AverageScoresOps;
    use crate::backend::host_buffers::{owned, slice, slice_mut};
    use crate::slots::average_scores::args::AverageScoresArgs;
    use crate::slots::average_scores::reference::average;

    impl AverageScoresOps for Flex {
        fn average_scores(args: AverageScoresArgs<Self>) -> (FlexTensor, FlexTensor) {
            let [mut log_scores, mut log_samples] = [args.log_scores, args.log_samples].map(owned);
            let logits = args.logits.to_contiguous();
            let log_weights = args.log_weights.as_ref().map(FlexTensor::to_contiguous);
            average(
                slice_mut::<f32>(&mut log_scores),
                slice_mut::<f32>(&mut log_samples),
                slice(&logits),
                log_weights.as_ref().map(slice),
                args.weights,
            );
            (log_scores, log_samples)
        }
    }
}
