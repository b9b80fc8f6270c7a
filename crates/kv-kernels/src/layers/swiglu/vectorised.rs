//! `swiglu` on CPUs, by vector instructions and on all cores.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::components::host_vectors::exponentials;

/// Numbers that a core gates at a time, as waking it takes some 10 µs.
const PART: usize = 1 << 14;

/// Gates rows: `[N, 2 I]` to `[N, I]`.
pub(crate) fn swiglu(x: &[f32], width: usize) -> Vec<f32> {
    let arch = Arch::new();
    let mut gated = vec![0.0; x.len() / 2];
    let rows = gated.par_chunks_mut(width).zip(x.par_chunks(2 * width));
    rows.with_min_len(PART.div_ceil(width)).for_each(|(to, x)| {
        let (gates, ups) = x.split_at(width);
        arch.dispatch(GatedRow { gates, ups, to });
    });
    gated
}

/// `silu(gate) * up` of one row.
struct GatedRow<'a> {
    gates: &'a [f32],
    ups: &'a [f32],
    to: &'a mut [f32],
}

impl WithSimd for GatedRow<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { gates, ups, to } = self;
        to.iter_mut().zip(gates).for_each(|(to, gate)| *to = -gate);
        exponentials(simd, to, 0.0);
        for ((to, gate), up) in to.iter_mut().zip(gates).zip(ups) {
            *to = gate / (1.0 + *to) * up;
        }
    }
}
