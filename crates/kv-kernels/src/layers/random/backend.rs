//! The backend trait of `uniforms`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait RandomOps: Backend {
    /// A number in `[0, 1)` for each pair of `seeds` `[N, 2]` and `draws` `[N]`.
    fn uniforms(seeds: IntTensor<Self>, draws: IntTensor<Self>) -> FloatTensor<Self>;
}

#[cfg(feature = "gpu")]
impl RandomOps for CubeBackend {
    fn uniforms(seeds: IntTensor<Self>, draws: IntTensor<Self>) -> FloatTensor<Self> {
        super::launch::run(seeds, draws)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::RandomOps;
    use crate::backend::host_buffers::slice;
    use crate::layers::random::uniform;

    impl RandomOps for Flex {
        fn uniforms(seeds: FlexTensor, draws: FlexTensor) -> FlexTensor {
            let shape = draws.layout().shape().clone();
            let (seeds, draws) = (seeds.to_contiguous(), draws.to_contiguous());
            let seeds = slice::<i32>(&seeds).chunks(2);
            let numbers = seeds
                .zip(slice::<i32>(&draws))
                .map(|(seed, &draw)| uniform([seed[0] as u32, seed[1] as u32], draw as u32));
            FlexTensor::from_data(TensorData::new(numbers.collect::<Vec<f32>>(), shape))
        }
    }
}
