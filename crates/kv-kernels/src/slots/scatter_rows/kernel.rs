//! The CubeCL kernel: one unit a vector of a row.
//!
//! `columns` vectors a row of `rows`, `stride` vectors from one row of `pool` to the next.

use cubecl::prelude::*;

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
    // Not `slots.len()`: buffers may be longer than their tensors.
    if ABSOLUTE_POS < count * columns {
        let slot = slots[ABSOLUTE_POS / columns];
        if slot >= 0 {
            pool[slot as usize * stride + ABSOLUTE_POS % columns] = rows[ABSOLUTE_POS];
        }
    }
}

/// A tensor copied into another, a unit a vector.
#[cube(launch)]
pub(crate) fn assign_kernel<E: Numeric, N: Size>(
    to: &mut [Vector<E, N>],
    from: &[Vector<E, N>],
    count: usize,
    #[define(E)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < count {
        to[ABSOLUTE_POS] = from[ABSOLUTE_POS];
    }
}
