//! Rankings in plain loops: the CPU path, and the oracle of the kernels' tests.

use std::cmp::Ordering;

/// All indices ordered by score, the highest first; the lower index among equals, NaN last.
pub(crate) fn ranking(scores: &[f32]) -> Vec<i32> {
    let mut order: Vec<i32> = (0..scores.len() as i32).collect();
    order.sort_by(|&a, &b| descending(scores[a as usize], scores[b as usize]));
    order
}

/// The priorities of a row's tokens: 0 for the first, −1 for the second.
pub(crate) fn priorities(scores: &[f32], ranked: &[i32], leaders: &[i32]) -> Vec<f32> {
    let mut sums: Vec<f32> = ranked.iter().map(|&at| scores[at as usize]).collect();
    let mut is_merged = vec![false; sums.len()];
    for rank in (0..sums.len()).rev() {
        let finite = scores[ranked[rank] as usize].is_finite();
        if let Some(leader) = usize::try_from(leaders[rank]).ok().filter(|_| finite) {
            sums[leader] += sums[rank].max(0.0);
            is_merged[rank] = true;
        }
    }
    let mut order: Vec<usize> = (0..sums.len()).collect();
    order.sort_by(|&a, &b| is_merged[a].cmp(&is_merged[b]).then(descending(sums[a], sums[b])));
    let mut priorities = vec![0.0; sums.len()];
    for (priority, rank) in order.into_iter().enumerate() {
        priorities[ranked[rank] as usize] = -(priority as f32);
    }
    priorities
}

/// An order with the higher number first, equal numbers equal (`-0.0` and `0.0` too), and NaN last.
fn descending(a: f32, b: f32) -> Ordering {
    match (a.is_nan(), b.is_nan()) {
        (false, false) => b.partial_cmp(&a).unwrap_or(Ordering::Equal),
        (a_nan, b_nan) => a_nan.cmp(&b_nan),
    }
}
