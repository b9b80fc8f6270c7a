//! The backend trait of `pool_rows`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::RowPool;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait PooledRowsOps: Backend {
    /// Scores `[R, T]`, pooled over windows of `size` columns.
    fn pool_rows(scores: FloatTensor<Self>, size: usize, pool: RowPool) -> FloatTensor<Self>;
}

#[cfg(feature = "gpu")]
impl PooledRowsOps for CubeBackend {
    fn pool_rows(scores: FloatTensor<Self>, size: usize, pool: RowPool) -> FloatTensor<Self> {
        super::launch::run(scores, size, pool)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;
    use rayon::prelude::*;

    use super::{PooledRowsOps, RowPool};
    use crate::backend::host_buffers::wide;

    impl PooledRowsOps for Flex {
        fn pool_rows(scores: FlexTensor, size: usize, pool: RowPool) -> FlexTensor {
            let shape: [usize; 2] = scores.layout().shape().dims();
            let columns = shape[1];
            let scores = wide(&scores);
            let mut pooled = vec![0.0; scores.len()];
            let rows = pooled.par_chunks_mut(columns).zip(scores.par_chunks(columns));
            rows.for_each(|(pooled, scores)| {
                for (at, own) in pooled.iter_mut().enumerate() {
                    let window =
                        &scores[at.saturating_sub(size / 2)..columns.min(at + size / 2 + 1)];
                    *own = match pool {
                        RowPool::Average => window.iter().sum::<f32>() / size as f32,
                        RowPool::Maximum => window.iter().copied().fold(f32::NEG_INFINITY, larger),
                    };
                }
            });
            FlexTensor::from_data(TensorData::new(pooled, shape))
        }
    }

    /// The larger one, or NaN where one of them is NaN.
    fn larger(a: f32, b: f32) -> f32 {
        if b > a || b.is_nan() { b } else { a }
    }
}
