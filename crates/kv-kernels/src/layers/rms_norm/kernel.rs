//! The kernel of `rms_norm` and `add_rms_norm`, with one cube a row.

use cubecl::prelude::*;

/// Units of a cube.
pub(crate) const UNITS: usize = 256;

/// The rows to normalise.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct NormedRows<E: Float, N: Size> {
    /// `[rows, columns]`, in vectors of `N`.
    x: Box<[Vector<E, N>]>,
    /// The tensor that is added first, `[rows, columns]`, where the kernel `adds`.
    delta: Box<[Vector<E, N>]>,
    /// Norm weights, `[columns]`, in vectors of `N`.
    weight: Box<[Vector<E, N>]>,
    rows: usize,
    /// Vectors of a row.
    columns: usize,
    /// The number that is added to mean squares.
    epsilon: f32,
}

/// Normalised rows, and their sums.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct NormOutputs<E: Float, N: Size> {
    /// `[rows, columns]`, in vectors of `N`.
    normed: Box<[Vector<E, N>]>,
    /// `x + delta`, `[rows, columns]`, where the kernel `adds`.
    sum: Box<[Vector<E, N>]>,
}

/// Normalises each row by one cube.
#[cube(launch_unchecked)]
pub(crate) fn rms_norm_kernel<E: Float, N: Size>(
    given: &NormedRows<E, N>,
    outputs: &mut NormOutputs<E, N>,
    #[comptime] adds: bool,
    #[define(E)] _dtype: ElemType,
) {
    let row = CUBE_POS;
    if row >= given.rows {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let columns = given.columns;
    let start = row * columns;
    let lanes = N::value();
    let mut squares = Vector::<f32, N>::new(0.0f32);
    let mut i = unit;
    while i < columns {
        let mut own = given.x[start + i];
        if adds {
            let wide = Vector::<f32, N>::cast_from(own) + Vector::cast_from(given.delta[start + i]);
            own = Vector::cast_from(wide);
            outputs.sum[start + i] = own;
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
    // Room for one number a plane, however narrow planes are.
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
    let root = (total / f32::cast_from(columns * lanes) + given.epsilon).sqrt();
    let divisor = Vector::<f32, N>::new(root);
    let mut i = unit;
    while i < columns {
        let mut own = Vector::<f32, N>::cast_from(given.x[start + i]);
        if adds {
            own = Vector::cast_from(outputs.sum[start + i]);
        }
        let rounded = Vector::<f32, N>::cast_from(Vector::<E, N>::cast_from(own / divisor));
        let weighted = rounded * Vector::cast_from(given.weight[i]);
        outputs.normed[start + i] = Vector::cast_from(weighted);
        i += UNITS;
    }
}
