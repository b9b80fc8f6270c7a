//! `linear` in plain loops: the CPU path. Every output is one dot product, summed in one order
//! whatever the number of rows.

use rayon::prelude::*;

use crate::layers::swiglu::reference::swiglu;

/// The fewest multiply-adds for which threads gain more than they cost.
const SERIAL: usize = 1 << 17;

/// `x` `[N, K]` times the transpose of `weight` `[M, K]`, as `[N, M]`, reading elements through
/// `load`.
pub(crate) fn product<E: Copy + Sync>(
    x: &[f32],
    weight: &[E],
    inputs: usize,
    load: impl Fn(E) -> f32 + Copy + Sync,
) -> Vec<f32> {
    let (rows, outputs) = (x.len() / inputs, weight.len() / inputs);
    let mut y = vec![0.0; rows * outputs];
    if x.len() * outputs < SERIAL {
        columns(x, weight, inputs, load, &mut y);
        return y;
    }
    // Outputs are the outer dimension, so that each thread writes to a slice of its own.
    let part = outputs.div_ceil(4 * rayon::current_num_threads()).max(8);
    let mut turned = vec![0.0; rows * outputs];
    let parts = turned.par_chunks_mut(part * rows).zip(weight.par_chunks(part * inputs));
    parts.for_each(|(to, weight)| columns(x, weight, inputs, load, to));
    if rows == 1 {
        return turned;
    }
    for (at, chunk) in turned.chunks(part * rows).enumerate() {
        let width = chunk.len() / rows;
        for (row, values) in chunk.chunks(width).enumerate() {
            y[row * outputs + at * part..][..width].copy_from_slice(values);
        }
    }
    y
}

/// Applies bias, gate and residual to sums `[N, M]`.
pub(crate) fn finish(
    sums: Vec<f32>,
    outputs: usize,
    bias: Option<&[f32]>,
    gates: bool,
    residual: Option<&[f32]>,
) -> Vec<f32> {
    let mut y = sums;
    if let Some(bias) = bias {
        let rows = y.chunks_mut(outputs);
        rows.for_each(|row| row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias));
    }
    if gates {
        y = swiglu(&y, outputs / 2);
    }
    if let Some(residual) = residual {
        y.iter_mut().zip(residual).for_each(|(y, residual)| *y += residual);
    }
    y
}

/// All rows times some of the outputs, `[N, outputs of weight]`.
fn columns<E: Copy>(
    x: &[f32],
    weight: &[E],
    inputs: usize,
    load: impl Fn(E) -> f32 + Copy,
    y: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has both features.
        unsafe { columns_avx2(x, weight, inputs, load, y) };
        return;
    }
    columns_of::<E, false>(x, weight, inputs, load, y);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn columns_avx2<E: Copy>(
    x: &[f32],
    weight: &[E],
    inputs: usize,
    load: impl Fn(E) -> f32 + Copy,
    y: &mut [f32],
) {
    columns_of::<E, true>(x, weight, inputs, load, y);
}

#[inline(always)]
fn columns_of<E: Copy, const FUSED: bool>(
    x: &[f32],
    weight: &[E],
    inputs: usize,
    load: impl Fn(E) -> f32 + Copy,
    y: &mut [f32],
) {
    let outputs = weight.len() / inputs;
    for (column, weight) in weight.chunks_exact(inputs).enumerate() {
        for (row, x) in x.chunks_exact(inputs).enumerate() {
            y[row * outputs + column] = dot::<E, FUSED>(x, weight, load);
        }
    }
}

/// A dot product in 32 independent sums, so that it vectorises.
#[inline(always)]
fn dot<E: Copy, const FUSED: bool>(x: &[f32], w: &[E], load: impl Fn(E) -> f32) -> f32 {
    const LANES: usize = 32;
    let add = |sum: f32, a: f32, b: f32| if FUSED { a.mul_add(b, sum) } else { sum + a * b };
    let mut sums = [0.0f32; LANES];
    let (xs, ws) = (x.chunks_exact(LANES), w.chunks_exact(LANES));
    let mut rest = 0.0;
    for (a, b) in xs.remainder().iter().zip(ws.remainder()) {
        rest = add(rest, *a, load(*b));
    }
    for (a, b) in xs.zip(ws) {
        for lane in 0..LANES {
            sums[lane] = add(sums[lane], a[lane], load(b[lane]));
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0] + rest
}
