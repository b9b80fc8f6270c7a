//! The backend trait of `rms_norm`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use crate::backend::optional::OptionalFloat;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait RmsNormOps: Backend {
    /// Normalises the rows of `x`, or of `x + delta` where there is a `delta`. Returns the
    /// normalised rows, and the rows before the norm.
    fn rms_norm(
        x: FloatTensor<Self>,
        #[extension_type] delta: OptionalFloat<Self>,
        weight: FloatTensor<Self>,
        epsilon: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

#[cfg(feature = "gpu")]
impl RmsNormOps for CubeBackend {
    fn rms_norm(
        x: FloatTensor<Self>,
        delta: OptionalFloat<Self>,
        weight: FloatTensor<Self>,
        epsilon: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        super::launch::run(x, delta, weight, epsilon)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU.

    use burn::backend::{DType, Flex};
    use burn_flex::FlexTensor;

    use super::RmsNormOps;
    use crate::backend::host_buffers::{rounded, rounding, wide};
    use crate::backend::optional::OptionalFloat;
    use crate::layers::rms_norm::vectorised::rms_norm;

    impl RmsNormOps for Flex {
        fn rms_norm(
            x: FlexTensor,
            delta: OptionalFloat<Self>,
            weight: FlexTensor,
            epsilon: f32,
        ) -> (FlexTensor, FlexTensor) {
            let dtype = x.dtype();
            let shape: [usize; 2] = x.layout().shape().dims();
            let sum = match delta.as_ref() {
                Some(delta) => {
                    let (x, delta) = (wide(&x), wide(delta));
                    let sum = x.iter().zip(&*delta).map(|(x, delta)| x + delta);
                    rounded(sum.collect(), shape, dtype)
                }
                None => x,
            };
            let (rows, weight) = (wide(&sum), wide(&weight));
            let normed = match dtype {
                // Known to round nothing, so that the loop vectorises.
                DType::F32 => rms_norm(&rows, &weight, epsilon, |x| x),
                _ => rms_norm(&rows, &weight, epsilon, rounding(dtype)),
            };
            (rounded(normed, shape, dtype), sum)
        }
    }
}
