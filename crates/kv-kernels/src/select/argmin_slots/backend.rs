//! The backend trait of `argmin_slots`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::ArgminSlotsArgs;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait ArgminSlotsOps: Backend {
    /// The slot of each range's lowest score; a protected slot only if all are protected; `-1` for
    /// an empty range.
    fn argmin_slots(#[extension_type] args: ArgminSlotsArgs<Self>) -> IntTensor<Self>;
}

#[cfg(feature = "gpu")]
impl ArgminSlotsOps for CubeBackend {
    fn argmin_slots(args: ArgminSlotsArgs<Self>) -> IntTensor<Self> {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::ArgminSlotsOps;
    use crate::backend::host_buffers::slice;
    use crate::select::argmin_slots::args::ArgminSlotsArgs;
    use crate::select::argmin_slots::reference::argmin;

    impl ArgminSlotsOps for Flex {
        fn argmin_slots(args: ArgminSlotsArgs<Self>) -> FlexTensor {
            let ArgminSlotsArgs { scores, offsets, lengths, positions, newest, protection } = args;
            let shape = offsets.layout().shape().clone();
            let scores = scores.to_contiguous();
            let [offsets, lengths] = [offsets, lengths].map(|tensor| tensor.to_contiguous());
            let ages =
                [positions, newest].map(|tensor| tensor.as_ref().map(FlexTensor::to_contiguous));
            let ranges = [slice(&offsets), slice(&lengths)];
            let ages = ages.each_ref().map(|ages| ages.as_ref().map_or(&[][..], slice));
            let slots = argmin(slice(&scores), ranges, ages, protection);
            FlexTensor::from_data(TensorData::new(slots, shape))
        }
    }
}
