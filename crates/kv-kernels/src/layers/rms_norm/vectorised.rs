//! `rms_norm` on CPUs, by vector instructions and on all cores.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::components::host_vectors::dot;

/// Numbers that a core normalises at a time, as waking it takes some 10 µs.
const PART: usize = 1 << 15;

/// Normalises rows of `weight.len()` elements; `round` rounds to the dtype.
pub(crate) fn rms_norm(
    x: &[f32],
    weight: &[f32],
    epsilon: f32,
    round: impl Fn(f32) -> f32 + Copy + Sync,
) -> Vec<f32> {
    let width = weight.len();
    let arch = Arch::new();
    let mut normed = vec![0.0; x.len()];
    let rows = normed.par_chunks_mut(width).zip(x.par_chunks(width));
    rows.with_min_len(PART.div_ceil(width))
        .for_each(|(to, x)| arch.dispatch(Row { x, weight, epsilon, round, to }));
    normed
}

/// One row.
struct Row<'a, F> {
    x: &'a [f32],
    weight: &'a [f32],
    epsilon: f32,
    round: F,
    to: &'a mut [f32],
}

impl<F: Fn(f32) -> f32> WithSimd for Row<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, weight, epsilon, round, to } = self;
        let root = (dot(simd, x, x) / x.len() as f32 + epsilon).sqrt();
        for ((to, x), weight) in to.iter_mut().zip(x).zip(weight) {
            *to = round(x / root) * weight;
        }
    }
}
