//! The backend trait of `linear`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::LinearStrategy;
use super::args::Epilogue;
#[cfg(feature = "cuda")]
use crate::backend::optional::OptionalFloat;
#[cfg(feature = "cuda")]
use crate::peers::PeerArgs;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait LinearOps: Backend {
    /// The product of `x` `[N, K]` and the transpose of `weight` `[M, K]`, for few rows, by
    /// [`LinearStrategy::Portable`] or [`LinearStrategy::TensorCore`]; on a CPU by vector
    /// instructions, with weights of any type.
    fn skinny_product(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] epilogue: Epilogue<Self>,
        strategy: LinearStrategy,
    ) -> FloatTensor<Self>;
}

/// The backend trait of products on Hopper GPUs.
#[cfg(feature = "cuda")]
#[backend_extension(Cube)]
pub(crate) trait HopperLinearOps: Backend {
    /// [`LinearOps::skinny_product`] in f16 or bf16. Where there are weights `gain` `[K]`, the rows
    /// are normalised first. Results are added over `peers`.
    fn streamed_product(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] gain: OptionalFloat<Self>,
        epsilon: f32,
        #[extension_type] epilogue: Epilogue<Self>,
        #[extension_type] peers: PeerArgs<Self>,
    ) -> FloatTensor<Self>;

    /// The product of `x` `[N, K]` and the transpose of `weight` `[M, K]`, in f16 or bf16, by cubes
    /// that share sums.
    fn split_product(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] epilogue: Epilogue<Self>,
    ) -> FloatTensor<Self>;

    /// The product of `x` `[N, K]` and the transpose of `weight` `[M, K]`, in f16 or bf16.
    fn wide_product(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;
}

#[cfg(feature = "gpu")]
impl LinearOps for CubeBackend {
    fn skinny_product(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epilogue: Epilogue<Self>,
        strategy: LinearStrategy,
    ) -> FloatTensor<Self> {
        super::launch::skinny(x, weight, epilogue, strategy)
    }
}

#[cfg(feature = "cuda")]
impl HopperLinearOps for CubeBackend {
    fn streamed_product(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gain: OptionalFloat<Self>,
        epsilon: f32,
        epilogue: Epilogue<Self>,
        peers: PeerArgs<Self>,
    ) -> FloatTensor<Self> {
        super::launch::streamed(x, weight, gain, epsilon, epilogue, peers)
    }

    fn split_product(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epilogue: Epilogue<Self>,
    ) -> FloatTensor<Self> {
        super::launch::split(x, weight, epilogue)
    }

    fn wide_product(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        super::launch::wide(x, weight)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU.

    use burn::backend::{DType, Element, Flex};
    use burn_flex::FlexTensor;
    use bytemuck::Pod;
    use half::{bf16, f16};

    use super::{LinearOps, LinearStrategy};
    use crate::backend::host_buffers::{rounded, slice, wide};
    use crate::components::host_vectors::HostFloat;
    use crate::layers::linear::args::Epilogue;
    use crate::layers::linear::vectorised::{finish, product};

    impl LinearOps for Flex {
        fn skinny_product(
            x: FlexTensor,
            weight: FlexTensor,
            epilogue: Epilogue<Self>,
            _strategy: LinearStrategy,
        ) -> FlexTensor {
            match weight.dtype() {
                DType::F16 => product_of::<f16>(x, weight, epilogue),
                DType::BF16 => product_of::<bf16>(x, weight, epilogue),
                _ => product_of::<f32>(x, weight, epilogue),
            }
        }
    }

    fn product_of<E: Element + Pod + HostFloat>(
        x: FlexTensor,
        weight: FlexTensor,
        epilogue: Epilogue<Flex>,
    ) -> FlexTensor {
        let ([rows, inputs], [outputs, _]) =
            (x.layout().shape().dims(), weight.layout().shape().dims());
        let dtype = x.dtype();
        let weight = weight.to_contiguous();
        let sums = product(&wide(&x), slice::<E>(&weight), inputs);
        let [bias, residual] =
            [&epilogue.bias, &epilogue.residual].map(|tensor| tensor.as_ref().map(wide));
        let gated = epilogue.config.gated;
        let y = finish(sums, outputs, bias.as_deref(), gated, residual.as_deref());
        rounded(y, [rows, outputs / epilogue.config.parts()], dtype)
    }
}
