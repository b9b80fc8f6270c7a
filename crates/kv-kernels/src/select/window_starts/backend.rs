//! The backend trait of `window_starts`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::WindowStartsArgs;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait WindowStartsOps: Backend {
    /// The first slot of each range that is at or after the start of its sequence's window.
    fn window_starts(#[extension_type] args: WindowStartsArgs<Self>) -> IntTensor<Self>;
}

#[cfg(feature = "gpu")]
impl WindowStartsOps for CubeBackend {
    fn window_starts(args: WindowStartsArgs<Self>) -> IntTensor<Self> {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::WindowStartsOps;
    use crate::backend::host_buffers::slice;
    use crate::select::window_starts::args::WindowStartsArgs;
    use crate::select::window_starts::reference::starts;

    impl WindowStartsOps for Flex {
        fn window_starts(args: WindowStartsArgs<Self>) -> FlexTensor {
            let WindowStartsArgs { positions, offsets, lengths, newest, share } = args;
            let shape = offsets.layout().shape().clone();
            let [positions, offsets, lengths, newest] =
                [positions, offsets, lengths, newest].map(|tensor| tensor.to_contiguous());
            let [positions, offsets, lengths, newest] =
                [&positions, &offsets, &lengths, &newest].map(slice);
            let starts = starts(positions, offsets, lengths, newest, share);
            FlexTensor::from_data(TensorData::new(starts, shape))
        }
    }
}
