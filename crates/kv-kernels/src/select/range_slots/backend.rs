//! The backend trait of `range_slots`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait RangeSlotsOps: Backend {
    /// The first `width` slots of every range.
    fn range_slots(offsets: IntTensor<Self>, width: usize) -> IntTensor<Self>;
}

#[cfg(feature = "gpu")]
impl RangeSlotsOps for CubeBackend {
    fn range_slots(offsets: IntTensor<Self>, width: usize) -> IntTensor<Self> {
        super::launch::run(offsets, width)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::RangeSlotsOps;
    use crate::backend::host_buffers::slice;

    impl RangeSlotsOps for Flex {
        fn range_slots(offsets: FlexTensor, width: usize) -> FlexTensor {
            let offsets = offsets.to_contiguous();
            let offsets: &[i32] = slice(&offsets);
            let slots =
                offsets.iter().flat_map(|&offset| (0..width as i32).map(move |i| offset + i));
            let slots: Vec<i32> = slots.collect();
            FlexTensor::from_data(TensorData::new(slots, [offsets.len(), width]))
        }
    }
}
