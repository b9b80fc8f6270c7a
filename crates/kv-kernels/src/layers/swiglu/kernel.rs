//! The kernel of `swiglu`, with one unit for each vector of the result.

use cubecl::prelude::*;

/// `silu(gate) * up`.
#[cube]
pub(crate) fn gated<N: Size>(gate: Vector<f32, N>, up: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    gate / (one + (-gate).exp()) * up
}

/// # Shapes
/// `x` `[N, 2 columns]` and `y` `[N, columns]`, in vectors.
#[cube(launch_unchecked)]
pub(crate) fn swiglu_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    y: &mut [Vector<E, N>],
    count: usize,
    columns: usize,
    #[define(E)] _dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < count {
        let gate = at / columns * 2 * columns + at % columns;
        let result = gated::<N>(Vector::cast_from(x[gate]), Vector::cast_from(x[gate + columns]));
        y[at] = Vector::cast_from(result);
    }
}
