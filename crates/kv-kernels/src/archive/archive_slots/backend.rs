//! The backend trait of `archive_slots`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::ArchiveArgs;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait ArchiveOps: Backend {
    /// Copies slots, in place. Returns the tensors of rows, signatures, key statistics and value
    /// means.
    fn archive_slots(
        #[extension_type] args: ArchiveArgs<Self>,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>);
}

#[cfg(feature = "gpu")]
impl ArchiveOps for CubeBackend {
    fn archive_slots(
        args: ArchiveArgs<Self>,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>) {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{DType, Flex};
    use burn_flex::FlexTensor;
    use half::{bf16, f16};

    use super::ArchiveOps;
    use crate::archive::archive_slots::args::ArchiveArgs;
    use crate::archive::archive_slots::reference::HostPool;
    use crate::backend::host_buffers::{dims, owned, slice, slice_mut};

    impl ArchiveOps for Flex {
        fn archive_slots(
            args: ArchiveArgs<Self>,
        ) -> (FlexTensor, FlexTensor, FlexTensor, FlexTensor) {
            let ArchiveArgs { pool, keys, values, from, to } = args;
            let [_, head_dim] = dims(&keys);
            let [_, count] = dims(&from);
            let mut rows = owned(pool.rows.tensor);
            let mut signatures = owned(pool.signatures);
            let mut key_statistics = owned(pool.key_statistics);
            let mut value_means = owned(pool.value_means);
            let [keys, values] = [keys, values].map(|tensor| tensor.to_contiguous());
            let [from, to] = [from, to].map(|tensor| tensor.to_contiguous());
            let mut pool = HostPool {
                rows: slice_mut(&mut rows),
                signatures: slice_mut(&mut signatures),
                key_statistics: slice_mut(&mut key_statistics),
                value_means: slice_mut(&mut value_means),
                keeps_slots: pool.keeps_slots,
                head_dim,
            };
            let (from, to) = (slice(&from), slice(&to));
            match keys.dtype() {
                DType::F16 => pool.archive::<f16>([&keys, &values].map(slice), from, to, count),
                DType::BF16 => pool.archive::<bf16>([&keys, &values].map(slice), from, to, count),
                _ => pool.archive::<f32>([&keys, &values].map(slice), from, to, count),
            }
            (rows, signatures, key_statistics, value_means)
        }
    }
}
