//! The backend trait of `quantize_slots`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::QuantizeArgs;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait QuantizeOps: Backend {
    /// Quantises slots, in place. Returns the codes and scales of keys, and of values.
    fn quantize_slots(
        #[extension_type] args: QuantizeArgs<Self>,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>);
}

#[cfg(feature = "gpu")]
impl QuantizeOps for CubeBackend {
    fn quantize_slots(
        args: QuantizeArgs<Self>,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>) {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::Flex;
    use burn_flex::FlexTensor;

    use super::QuantizeOps;
    use crate::backend::host_buffers::{dims, owned, slice, slice_mut, wide};
    use crate::quantized::quantize_slots::args::QuantizeArgs;
    use crate::quantized::quantize_slots::reference::{HostPool, Source};

    impl QuantizeOps for Flex {
        fn quantize_slots(
            args: QuantizeArgs<Self>,
        ) -> (FlexTensor, FlexTensor, FlexTensor, FlexTensor) {
            let QuantizeArgs { pool, keys, values, from, to } = args;
            let [_, head_dim] = dims(&keys);
            let [_, count] = dims(&from);
            let mut key_codes = owned(pool.key_codes);
            let mut key_scales = owned(pool.key_scales);
            let mut value_codes = owned(pool.value_codes);
            let mut value_scales = owned(pool.value_scales);
            let (keys, values) = (wide(&keys), wide(&values));
            let (from, to) = (from.to_contiguous(), to.to_contiguous());
            let source = Source { keys: &keys, values: &values, head_dim };
            HostPool {
                key_codes: slice_mut(&mut key_codes),
                key_scales: slice_mut(&mut key_scales),
                value_codes: slice_mut(&mut value_codes),
                value_scales: slice_mut(&mut value_scales),
                bits: pool.bits,
            }
            .quantize(&source, slice(&from), slice(&to), count);
            (key_codes, key_scales, value_codes, value_scales)
        }
    }
}
