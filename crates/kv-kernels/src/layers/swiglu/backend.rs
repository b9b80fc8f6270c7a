//! The backend trait of `swiglu`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait SwigluOps: Backend {
    /// `silu` of the left half of `[N, 2 I]` times the right half.
    fn swiglu(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

#[cfg(feature = "gpu")]
impl SwigluOps for CubeBackend {
    fn swiglu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        super::launch::run(x)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU.

    use burn::backend::Flex;
    use burn_flex::FlexTensor;

    use super::SwigluOps;
    use crate::backend::host_buffers::{rounded, wide};
    use crate::layers::swiglu::vectorised::swiglu;

    impl SwigluOps for Flex {
        fn swiglu(x: FlexTensor) -> FlexTensor {
            let [rows, width] = x.layout().shape().dims();
            rounded(swiglu(&wide(&x), width / 2), [rows, width / 2], x.dtype())
        }
    }
}
