//! The backend trait of `causal_softmax`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait CausalSoftmaxOps: Backend {
    /// The weights `[R, N, T]` and the log-sum-exps `[R, N]` of logits `[R, N, T]`.
    fn causal_softmax(logits: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>);
}

#[cfg(feature = "gpu")]
impl CausalSoftmaxOps for CubeBackend {
    fn causal_softmax(logits: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        super::launch::run(logits)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::CausalSoftmaxOps;
    use crate::attention::causal_softmax::vectorised::causal_softmax;
    use crate::backend::host_buffers::wide;

    impl CausalSoftmaxOps for Flex {
        fn causal_softmax(logits: FlexTensor) -> (FlexTensor, FlexTensor) {
            let shape: [usize; 3] = logits.layout().shape().dims();
            let [rows, queries, tokens] = shape;
            let mut weights = wide(&logits).into_vec();
            let log_sums = causal_softmax(&mut weights, queries, tokens);
            let tensor = |data: TensorData| FlexTensor::from_data(data);
            let log_sums = TensorData::new(log_sums, [rows, queries]);
            (tensor(TensorData::new(weights, shape)), tensor(log_sums))
        }
    }
}
