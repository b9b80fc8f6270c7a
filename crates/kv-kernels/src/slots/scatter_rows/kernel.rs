//! Kernels that write rows and tensors, with one unit a vector.
//!
//! Writes `rows`, of `columns` vectors each, into `pool`, whose rows begin `stride` vectors apart.

use cubecl::prelude::*;
use cubecl::std::tensor::layout::linear::LinearViewMut;

#[cube(launch)]
pub(crate) fn scatter_rows_kernel<E: Numeric, N: Size>(
    pool: &mut [Vector<E, N>],
    slots: &[i32],
    rows: &[Vector<E, N>],
    count: usize,
    columns: usize,
    stride: usize,
    #[define(E)] _dtype: ElemType,
) {
    // `slots.len()` would not do: buffers may be longer than their tensors.
    if ABSOLUTE_POS < count * columns {
        let slot = slots[ABSOLUTE_POS / columns];
        if slot >= 0 {
            pool[slot as usize * stride + ABSOLUTE_POS % columns] = rows[ABSOLUTE_POS];
        }
    }
}

/// Copies one tensor into another one, whose rows may be padded, with one unit a vector.
#[cube(launch)]
pub(crate) fn assign_kernel<E: Numeric, N: Size>(
    mut to: LinearViewMut<'_, Vector<E, N>>,
    from: &[Vector<E, N>],
    #[define(E)] _dtype: ElemType,
) {
    if to.is_in_bounds(ABSOLUTE_POS) {
        to.write(ABSOLUTE_POS, from[ABSOLUTE_POS]);
    }
}
