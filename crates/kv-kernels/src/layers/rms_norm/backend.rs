//! The backend trait of `rms_norm`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait RmsNormOps: Backend {
    /// Normalises the rows of `x`, or of `x + delta` where `adds`. Returns them, and the sum `x +
    /// delta` (else any tensor).
    fn rms_norm(
        x: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f32,
        adds: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

#[cfg(feature = "gpu")]
impl RmsNormOps for CubeBackend {
    fn rms_norm(
        x: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f32,
        adds: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        super::launch::run(x, delta, weight, epsilon, adds)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::Flex;
    use burn_flex::FlexTensor;

    use super::RmsNormOps;
    use crate::backend::host_buffers::{rounded, rounding, wide};
    use crate::layers::rms_norm::reference::rms_norm;

    impl RmsNormOps for Flex {
        fn rms_norm(
            x: FlexTensor,
            delta: FlexTensor,
            weight: FlexTensor,
            epsilon: f32,
            adds: bool,
        ) -> (FlexTensor, FlexTensor) {
            let dtype = x.dtype();
            let shape: [usize; 2] = x.layout().shape().dims();
            let sum = if adds {
                let sum = wide(&x).iter().zip(wide(&delta)).map(|(x, delta)| x + delta).collect();
                rounded(sum, shape, dtype)
            } else {
                x
            };
            let normed = rms_norm(&wide(&sum), &wide(&weight), epsilon, rounding(dtype));
            (rounded(normed, shape, dtype), sum)
        }
    }
}
