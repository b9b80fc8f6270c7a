//! The CubeCL kernel: one cube a row.

use cubecl::prelude::*;

/// Units of a cube.
pub(crate) const UNITS: usize = 256;

/// # Shapes
/// In vectors: `x`, `delta`, `normed` and `sum` `[N, columns]`, `weight` `[columns]`; without
/// `adds`, `delta` is not read and `sum` not written.
#[cube(launch_unchecked)]
pub(crate) fn rms_norm_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    delta: &[Vector<E, N>],
    weight: &[Vector<E, N>],
    normed: &mut [Vector<E, N>],
    sum: &mut [Vector<E, N>],
    rows: usize,
    columns: usize,
    epsilon: f32,
    #[comptime] adds: bool,
    #[define(E)] _dtype: ElemType,
) {
    let row = CUBE_POS;
    if row >= rows {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let start = row * columns;
    let lanes = N::value();
    let mut squares = Vector::<f32, N>::new(0.0f32);
    let mut i = unit;
    while i < columns {
        let mut own = x[start + i];
        if adds {
            let wide = Vector::<f32, N>::cast_from(own) + Vector::cast_from(delta[start + i]);
            own = Vector::cast_from(wide);
            sum[start + i] = own;
        }
        let wide = Vector::<f32, N>::cast_from(own);
        squares += wide * wide;
        i += UNITS;
    }
    let mut own = 0.0f32;
    #[unroll]
    for lane in 0..lanes {
        own += squares.extract(lane);
    }
    // One number a plane, whatever the width of planes.
    let mut parts = Shared::<[f32]>::new_slice(UNITS);
    let of_plane = plane_sum(own);
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    if UNIT_POS_PLANE == 0 {
        parts[plane] = of_plane;
    }
    sync_cube();
    let planes = (comptime!(UNITS as u32) / PLANE_DIM) as usize;
    let mut total = 0.0f32;
    for other in 0..planes {
        total += parts[other];
    }
    let root = (total / f32::cast_from(columns * lanes) + epsilon).sqrt();
    let divisor = Vector::<f32, N>::new(root);
    let mut i = unit;
    while i < columns {
        let mut own = Vector::<f32, N>::cast_from(x[start + i]);
        if adds {
            own = Vector::cast_from(sum[start + i]);
        }
        let rounded = Vector::<f32, N>::cast_from(Vector::<E, N>::cast_from(own / divisor));
        let weighted = rounded * Vector::cast_from(weight[i]);
        normed[start + i] = Vector::cast_from(weighted);
        i += UNITS;
    }
}
