//! `top_slots` in plain loops: the CPU path, and the oracle of the kernel's tests.

use std::cmp::Ordering;

/// The ascending indices of the `count` highest scores; the lower index among equals, NaN last.
pub(crate) fn top(scores: &[f32], count: usize) -> Vec<i32> {
    let mut order: Vec<i32> = (0..scores.len() as i32).collect();
    if count < order.len() {
        let better =
            |a: &i32, b: &i32| descending(scores[*a as usize], scores[*b as usize]).then(a.cmp(b));
        if count > 0 {
            order.select_nth_unstable_by(count - 1, better);
        }
        order.truncate(count);
        order.sort_unstable();
    }
    order
}

/// The indices of the scores from `bound` on. NaN is below every bound.
pub(crate) fn above(scores: &[f32], bound: f32) -> Vec<i32> {
    let indices = (0..).zip(scores).filter(|(_, score)| **score >= bound);
    indices.map(|(index, _)| index).collect()
}

/// An order with the higher number first, equal numbers equal (`-0.0` and `0.0` too), and NaN last.
fn descending(a: f32, b: f32) -> Ordering {
    match (a.is_nan(), b.is_nan()) {
        (false, false) => b.partial_cmp(&a).unwrap_or(Ordering::Equal),
        (a_nan, b_nan) => a_nan.cmp(&b_nan),
    }
}
