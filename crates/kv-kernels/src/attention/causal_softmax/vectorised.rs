//! `causal_softmax` on CPUs, by vector instructions and on all cores.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::components::host_vectors::{exponentials, maximum, sum};

/// Numbers that a core takes at a time, as waking it takes some 10 µs.
const PART: usize = 1 << 15;

/// Turns logits `[R, N, T]` into weights, and returns the log-sum-exps `[R, N]`.
pub(crate) fn causal_softmax(logits: &mut [f32], queries: usize, tokens: usize) -> Vec<f32> {
    let arch = Arch::new();
    let rows = logits.par_chunks_mut(tokens).enumerate().with_min_len(PART.div_ceil(tokens));
    rows.map(|(row, logits)| {
        let seen = tokens - queries + row % queries + 1;
        let (logits, hidden) = logits.split_at_mut(seen);
        hidden.fill(0.0);
        arch.dispatch(Row { logits })
    })
    .collect()
}

/// The logits that one query sees.
struct Row<'a> {
    logits: &'a mut [f32],
}

impl WithSimd for Row<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let Self { logits } = self;
        let top = maximum(simd, logits);
        exponentials(simd, logits, top);
        let total = sum(simd, logits);
        if total != 0.0 {
            logits.iter_mut().for_each(|weight| *weight /= total);
        }
        top + total.ln()
    }
}
