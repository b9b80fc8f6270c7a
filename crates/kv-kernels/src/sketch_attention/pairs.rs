//! Rows by matrix instructions, for up to four query heads: a team of eight units has two rows at a time, each unit
//! every eighth vector of both, as they are read without conflict from shared memory.
//!
//! A product of 16 by 8 takes the eight units' vectors as two of its rows, the first four as one and the last four as
//! another, and queries as columns in the same halves: `Q` of heads 0 to 3 in their first half, then in their second.
//! What meets the wrong half is not looked at. The sums of both halves are a logit, of which each unit is left with one:
//! four query heads of two rows.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::sums::Shape;
use crate::decode_attention::shared::{LOWEST, larger, weight_of};

/// Elements of a vector, which are four registers of a product.
pub(super) const LANES: usize = 8;
/// Units that share a row.
pub(super) const TEAM: usize = 8;
/// Rows that a team takes at a time.
pub(super) const ROWS: usize = 2;
/// Query heads, at most.
pub(super) const HEADS: usize = 4;
/// From a unit to that which has the same head of the other row, and to that with the other half's sums.
const OTHER_ROW: u32 = 6;

/// The unit of a team that is left with a row's logit of a query head.
const fn owner(row: usize, head: usize) -> usize {
    TEAM / 2 * row + ((head % 2 * 2 + head / 2) ^ (2 * row))
}

/// Reads the queries in the halves of which they are columns.
///
/// # Shapes
/// In vectors: `query` `[P, group, columns]`, `q` `[own]`.
#[cube]
pub(super) fn read_queries<F: Float, N: Size>(
    query: &[Vector<F, N>],
    q: &mut Array<Vector<F, N>>,
    pair: usize,
    #[comptime] shape: Shape,
) {
    let lane = UNIT_POS_PLANE as usize;
    let (column, j) = (lane / 4, lane % 4);
    let (head, half) = (column % HEADS, column / HEADS);
    #[unroll]
    for c in 0..comptime!(shape.own()) {
        q[c] = Vector::new(F::new(0.0));
        if head < shape.group {
            let at = (pair * shape.group + head) * shape.columns;
            q[c] = query[at + comptime!(c * TEAM) + half * 4 + j];
        }
    }
}

/// As `take_rows` of vectors: two rows into the sums.
///
/// # Shapes
/// In vectors: `q` `[own]`, `acc` `[group, own]`, `k` and `v` `[2, own]`; `at` `[2]`; `maxima` and `sums` `[1]`, of the
/// unit's own query head. `logits` `[.., group]`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn take_pair<F: Float, N: Size>(
    q: &Array<Vector<F, N>>,
    k: &Array<Vector<F, N>>,
    v: &Array<Vector<F, N>>,
    at: &Array<usize>,
    none: usize,
    acc: &mut Array<Vector<f32, N>>,
    maxima: &mut Array<f32>,
    sums: &mut Array<f32>,
    logits: &mut [f32],
    scale: f32,
    member: usize,
    #[comptime] shape: Shape,
) {
    let group = shape.group.comptime();
    let own = shape.own().comptime();
    let def = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let zeros = Vector::<f32, Const<2>>::new(0.0f32);
    let mut dots = Array::<Vector<f32, Const<2>>>::new(2usize);
    dots[0] = zeros;
    dots[1] = zeros;
    #[unroll]
    for c in 0..own {
        let one = Vector::<u32, Const<4>>::reinterpret(k[c]);
        let other = Vector::<u32, Const<4>>::reinterpret(k[own + c]);
        let queries = Vector::<u32, Const<4>>::reinterpret(q[c]);
        #[unroll]
        for half in 0..2usize {
            let (low, high) = comptime!((2 * half, 2 * half + 1));
            let mut a = Array::<Vector<F, Const<2>>>::new(4usize);
            a[0] = Vector::reinterpret(one.extract(low));
            a[1] = Vector::reinterpret(other.extract(low));
            a[2] = Vector::reinterpret(one.extract(high));
            a[3] = Vector::reinterpret(other.extract(high));
            let mut b = Array::<Vector<F, Const<2>>>::new(2usize);
            b[0] = Vector::reinterpret(queries.extract(low));
            b[1] = Vector::reinterpret(queries.extract(high));
            dots = def.execute(&a, &b, &dots);
        }
    }

    // The first half of a team is left with the first row, the second with the second.
    let second = member >= comptime!(TEAM / 2);
    let j = member % comptime!(TEAM / 2);
    let mut halves = Array::<f32>::new(2usize);
    #[unroll]
    for i in 0..2usize {
        let (one, other) = (dots[0].extract(i), dots[1].extract(i));
        let (kept, sent) = (select(second, other, one), select(second, one, other));
        halves[i] = kept + plane_shuffle_xor(sent, OTHER_ROW);
    }
    // Units whose columns are of the wrong half take the second head of those whose are of the right one.
    let right = j / 2 == member / comptime!(TEAM / 2);
    let given = plane_shuffle_xor(halves[1], 2u32);
    let mut logit = select(right, halves[0], given) * scale;
    let turned = select(second, j ^ 2, j);
    let head = turned % 2 * 2 + turned / 2;
    let to = select(second, at[1], at[0]);
    if to != none && head < group {
        logits[to * group + head] = logit;
    } else {
        logit = f32::new(LOWEST);
    }

    let top = larger(maxima[0], larger(logit, plane_shuffle_xor(logit, OTHER_ROW)));
    let rescale = (maxima[0] - top).exp();
    let base = UNIT_POS_PLANE - member as u32;
    // Seldom, once some rows are seen.
    if plane_any(top != maxima[0]) {
        #[unroll]
        for g in 0..group {
            let own_rescale = plane_shuffle(rescale, base + comptime!(owner(0, g) as u32));
            #[unroll]
            for c in 0..own {
                acc[g * own + c] *= Vector::new(own_rescale);
            }
        }
    }
    maxima[0] = top;
    let p = weight_of(logit, top);
    sums[0] = sums[0] * rescale + p;
    #[unroll]
    for row in 0..ROWS {
        #[unroll]
        for g in 0..group {
            let share = plane_shuffle(p, base + comptime!(owner(row, g) as u32));
            #[unroll]
            for c in 0..own {
                acc[g * own + c] +=
                    Vector::<f32, N>::cast_from(v[row * own + c]) * Vector::new(share);
            }
        }
    }
}

/// Every query head's maximum and sum, `[group]`, for every unit of the team.
#[cube]
pub(super) fn gather_pairs(
    maxima: &Array<f32>,
    sums: &Array<f32>,
    all_maxima: &mut Array<f32>,
    all_sums: &mut Array<f32>,
    member: usize,
    #[comptime] shape: Shape,
) {
    let base = UNIT_POS_PLANE - member as u32;
    let both = sums[0] + plane_shuffle_xor(sums[0], OTHER_ROW);
    #[unroll]
    for g in 0..comptime!(shape.group) {
        let unit = base + comptime!(owner(0, g) as u32);
        all_maxima[g] = plane_shuffle(maxima[0], unit);
        all_sums[g] = plane_shuffle(both, unit);
    }
}
