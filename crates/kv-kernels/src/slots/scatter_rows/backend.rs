//! The backend trait of the ops that write rows, and its implementations for CubeCL devices and the
//! CPU.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait ScatterRowsOps: Backend {
    /// Writes row `n` of `rows` `[N, D]` into row `slots[n]` of `pool` `[S, D]`, in place.
    fn scatter_rows(
        pool: FloatTensor<Self>,
        slots: IntTensor<Self>,
        rows: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// Writes number `n` of `values` `[N]` into slot `slots[n]` of a pool of integers `[S]`, in
    /// place.
    fn scatter_ints(
        pool: IntTensor<Self>,
        slots: IntTensor<Self>,
        values: IntTensor<Self>,
    ) -> IntTensor<Self>;

    /// Copies `from` into the buffer of `to`.
    fn assign(to: FloatTensor<Self>, from: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Copies the integers `from` into the buffer of `to`.
    fn assign_ints(to: IntTensor<Self>, from: IntTensor<Self>) -> IntTensor<Self>;
}

#[cfg(feature = "gpu")]
impl ScatterRowsOps for CubeBackend {
    fn scatter_rows(
        pool: FloatTensor<Self>,
        slots: IntTensor<Self>,
        rows: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        super::launch::scatter(pool, slots, rows)
    }

    fn scatter_ints(
        pool: IntTensor<Self>,
        slots: IntTensor<Self>,
        values: IntTensor<Self>,
    ) -> IntTensor<Self> {
        super::launch::scatter(pool, slots, values)
    }

    fn assign(to: FloatTensor<Self>, from: FloatTensor<Self>) -> FloatTensor<Self> {
        super::launch::assign(to, from)
    }

    fn assign_ints(to: IntTensor<Self>, from: IntTensor<Self>) -> IntTensor<Self> {
        super::launch::assign(to, from)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::Flex;
    use burn_flex::FlexTensor;

    use super::ScatterRowsOps;
    use crate::backend::host_buffers::{owned, slice, slice_mut, with_element};
    use crate::slots::scatter_rows::reference::scatter;

    impl ScatterRowsOps for Flex {
        fn scatter_rows(pool: FlexTensor, slots: FlexTensor, rows: FlexTensor) -> FlexTensor {
            let (mut pool, slots, rows) =
                (owned(pool), slots.to_contiguous(), rows.to_contiguous());
            let slots = slice::<i32>(&slots);
            with_element!(pool.dtype(), E => {
                let rows = slice::<E>(&rows);
                let width = (rows.len() / slots.len().max(1)).max(1);
                scatter(slice_mut::<E>(&mut pool), slots, rows, width);
            });
            pool
        }

        fn scatter_ints(pool: FlexTensor, slots: FlexTensor, values: FlexTensor) -> FlexTensor {
            Self::scatter_rows(pool, slots, values)
        }

        fn assign(_to: FlexTensor, from: FlexTensor) -> FlexTensor {
            from.to_contiguous()
        }

        fn assign_ints(_to: FlexTensor, from: FlexTensor) -> FlexTensor {
            from.to_contiguous()
        }
    }
}
