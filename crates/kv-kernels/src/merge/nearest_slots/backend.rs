//! The backend trait of `nearest_slots`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::NearestSlotsArgs;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait NearestSlotsOps: Backend {
    /// The places `[P, N]` of the most similar keys in `among`, and their cosines `[P, N]`.
    fn nearest_slots(
        #[extension_type] args: NearestSlotsArgs<Self>,
    ) -> (IntTensor<Self>, FloatTensor<Self>);
}

#[cfg(feature = "gpu")]
impl NearestSlotsOps for CubeBackend {
    fn nearest_slots(args: NearestSlotsArgs<Self>) -> (IntTensor<Self>, FloatTensor<Self>) {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::NearestSlotsOps;
    use crate::backend::host_buffers::{slice, wide};
    use crate::merge::nearest_slots::args::NearestSlotsArgs;
    use crate::merge::nearest_slots::reference::Pairing;

    impl NearestSlotsOps for Flex {
        fn nearest_slots(args: NearestSlotsArgs<Self>) -> (FlexTensor, FlexTensor) {
            let NearestSlotsArgs { keys, of, of_counts, among, among_counts, options } = args;
            let [_, head_dim] = keys.layout().shape().dims();
            let shape: [usize; 2] = of.layout().shape().dims();
            let keys = wide(&keys);
            let [of, of_counts, among, among_counts] =
                [of, of_counts, among, among_counts].map(|tensor| tensor.to_contiguous());
            let (places, cosines) = Pairing {
                keys: &keys,
                head_dim,
                of: slice::<i32>(&of),
                of_counts: slice::<i32>(&of_counts),
                among: slice::<i32>(&among),
                among_counts: slice::<i32>(&among_counts),
                earlier: options.earlier,
            }
            .nearest();
            let places = FlexTensor::from_data(TensorData::new(places, shape));
            (places, FlexTensor::from_data(TensorData::new(cosines, shape)))
        }
    }
}
