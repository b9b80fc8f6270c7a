//! The backend trait of `rankings` and `group_priority_ranks`, and its implementations for CubeCL
//! devices and the CPU.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait RankingsOps: Backend {
    /// The indices of every row, ordered by score, `[R, T]`.
    fn rankings(scores: FloatTensor<Self>) -> IntTensor<Self>;

    /// The rank of each entry of every row, where entries compete in groups, as a priority; all
    /// `[R, T]`.
    fn group_priority_ranks(
        scores: FloatTensor<Self>,
        ranked: IntTensor<Self>,
        leaders: IntTensor<Self>,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "gpu")]
impl RankingsOps for CubeBackend {
    fn rankings(scores: FloatTensor<Self>) -> IntTensor<Self> {
        super::launch::rankings(scores)
    }

    fn group_priority_ranks(
        scores: FloatTensor<Self>,
        ranked: IntTensor<Self>,
        leaders: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        super::launch::group_priority_ranks(scores, ranked, leaders)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::RankingsOps;
    use crate::backend::host_buffers::slice;
    use crate::select::rankings::reference::{priorities, ranking};

    impl RankingsOps for Flex {
        fn rankings(scores: FlexTensor) -> FlexTensor {
            let shape: [usize; 2] = scores.layout().shape().dims();
            let scores = scores.to_contiguous();
            let rows = slice::<f32>(&scores).chunks(shape[1]);
            let ranked: Vec<i32> = rows.flat_map(ranking).collect();
            FlexTensor::from_data(TensorData::new(ranked, shape))
        }

        fn group_priority_ranks(
            scores: FlexTensor,
            ranked: FlexTensor,
            leaders: FlexTensor,
        ) -> FlexTensor {
            let shape: [usize; 2] = scores.layout().shape().dims();
            let [scores, ranked, leaders] = [scores, ranked, leaders].map(|t| t.to_contiguous());
            let rows = |tensor| slice::<i32>(tensor).chunks(shape[1]);
            let scores = slice::<f32>(&scores).chunks(shape[1]);
            let rows = scores.zip(rows(&ranked)).zip(rows(&leaders));
            let all: Vec<f32> = rows
                .flat_map(|((scores, ranked), leaders)| priorities(scores, ranked, leaders))
                .collect();
            FlexTensor::from_data(TensorData::new(all, shape))
        }
    }
}
