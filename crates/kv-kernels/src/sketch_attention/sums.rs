//! The online softmax of a team of units, for the query heads of a group.

use cubecl::prelude::*;

use crate::decode_attention::shared::{larger, weight_of};

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Query heads of a key-value head.
    pub(super) group: usize,
    /// Vectors of a row.
    pub(super) columns: usize,
    /// Units that share a row, a power of two within a plane.
    pub(super) team: usize,
    /// Rows that a team takes at a time.
    pub(super) ahead: usize,
}

impl Shape {
    /// Vectors of a unit; the last ones of a row may be short of a full turn.
    pub(super) fn own(self) -> usize {
        self.columns.div_ceil(self.team)
    }
}

/// Takes rows into the sums: logits of their keys, `exp` of them times their values.
///
/// # Shapes
/// In vectors: `q` and `acc` `[group, own]`, `k` and `v` `[ahead, own]`; `at` `[ahead]`, where a row's
/// logits go, `none` for no row; `maxima` and `sums` `[group]`. `logits` `[.., group]`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn take_rows<F: Float, N: Size>(
    q: &Array<Vector<f32, N>>,
    k: &Array<Vector<F, N>>,
    v: &Array<Vector<F, N>>,
    at: &Array<usize>,
    none: usize,
    acc: &mut Array<Vector<f32, N>>,
    maxima: &mut Array<f32>,
    sums: &mut Array<f32>,
    logits: &mut [f32],
    member: usize,
    #[comptime] shape: Shape,
) {
    let Shape { group, columns, team, ahead } = shape;
    let own = shape.own().comptime();
    #[unroll]
    for g in 0..group {
        let mut dots = Array::<f32>::new(ahead);
        let mut top = maxima[g];
        #[unroll]
        for a in 0..ahead {
            let mut dot = 0.0f32;
            #[unroll]
            for c in 0..own {
                // Columns beyond the row meet a query of zeros, but may hold anything.
                let mut product = Vector::<f32, N>::cast_from(k[a * own + c]).dot(q[g * own + c]);
                if comptime!(!columns.is_multiple_of(team)) {
                    product = select(member + c * team < columns, product, 0.0f32);
                }
                dot += product;
            }
            #[unroll]
            for level in 0..comptime!(team.ilog2()) {
                dot += plane_shuffle_xor(dot, comptime!(1u32 << level));
            }
            dots[a] = dot;
            if at[a] != none {
                if member == 0 {
                    logits[at[a] * group + g] = dot;
                }
                top = larger(top, dot);
            }
        }
        let rescale = (maxima[g] - top).exp();
        maxima[g] = top;
        sums[g] *= rescale;
        #[unroll]
        for c in 0..own {
            acc[g * own + c] *= Vector::new(rescale);
        }
        #[unroll]
        for a in 0..ahead {
            if at[a] != none {
                let p = weight_of(dots[a], top);
                sums[g] += p;
                #[unroll]
                for c in 0..own {
                    acc[g * own + c] +=
                        Vector::<f32, N>::cast_from(v[a * own + c]) * Vector::new(p);
                }
            }
        }
    }
}
