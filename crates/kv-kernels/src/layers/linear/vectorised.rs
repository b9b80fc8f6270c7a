//! `linear` for few rows on CPUs, by vector instructions and on all cores. Every output is one dot
//! product, summed in one order whatever the number of rows.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::components::host_vectors::{HostFloat, dot};
use crate::layers::swiglu::vectorised::swiglu;

/// Multiplications below which one core is faster than several, as waking them takes some 10 µs.
const ALONE: usize = 1 << 17;

/// `x` `[N, K]` times the transpose of `weight` `[M, K]`, as `[N, M]`.
pub(crate) fn product<E: HostFloat>(x: &[f32], weight: &[E], inputs: usize) -> Vec<f32> {
    let (rows, outputs) = (x.len() / inputs, weight.len() / inputs);
    let arch = Arch::new();
    let columns = |weight, y| arch.dispatch(Columns { x, weight, inputs, y });
    let mut y = vec![0.0; rows * outputs];
    if x.len() * outputs < ALONE {
        columns(weight, &mut y[..]);
        return y;
    }
    // Outputs are the outer dimension, so that each thread writes to a slice of its own.
    let part = outputs.div_ceil(4 * rayon::current_num_threads()).max(8);
    let mut turned = vec![0.0; rows * outputs];
    let parts = turned.par_chunks_mut(part * rows).zip(weight.par_chunks(part * inputs));
    parts.for_each(|(to, weight)| columns(weight, to));
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

/// All rows times some of the outputs.
struct Columns<'a, E> {
    x: &'a [f32],
    /// `[outputs, K]`
    weight: &'a [E],
    inputs: usize,
    /// `[N, outputs]`
    y: &'a mut [f32],
}

impl<E: HostFloat> WithSimd for Columns<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, weight, inputs, y } = self;
        let outputs = weight.len() / inputs;
        let mut room = vec![0.0; inputs];
        for (column, weight) in weight.chunks_exact(inputs).enumerate() {
            let weight = E::widened(weight, &mut room);
            for (row, x) in x.chunks_exact(inputs).enumerate() {
                y[row * outputs + column] = dot(simd, x, weight);
            }
        }
    }
}
