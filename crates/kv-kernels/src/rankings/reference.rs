//! The same in plain loops.

use std::cmp::Ordering;

/// All indices by score, highest first; the lower index among equals, NaN last.
pub(crate) fn ranking(scores: &[f32]) -> Vec<i32> {
    let mut order: Vec<i32> = (0..scores.len() as i32).collect();
    order.sort_by(|&a, &b| descending(scores[a as usize], scores[b as usize]));
    order
}

/// When each of a row has its turn, behind a minus.
pub(crate) fn turns(scores: &[f32], ranked: &[i32], leaders: &[i32]) -> Vec<f32> {
    let mut sums: Vec<f32> = ranked.iter().map(|&at| scores[at as usize]).collect();
    let mut joins = vec![false; sums.len()];
    for place in (0..sums.len()).rev() {
        let finite = scores[ranked[place] as usize].is_finite();
        if let Some(leader) = usize::try_from(leaders[place]).ok().filter(|_| finite) {
            sums[leader] += sums[place].max(0.0);
            joins[place] = true;
        }
    }
    let mut order: Vec<usize> = (0..sums.len()).collect();
    order.sort_by(|&a, &b| joins[a].cmp(&joins[b]).then(descending(sums[a], sums[b])));
    let mut turns = vec![0.0; sums.len()];
    for (turn, place) in order.into_iter().enumerate() {
        turns[ranked[place] as usize] = -(turn as f32);
    }
    turns
}

/// Higher first, equal floats equal (`-0.0` and `0.0` too), NaN last.
fn descending(a: f32, b: f32) -> Ordering {
    match (a.is_nan(), b.is_nan()) {
        (false, false) => b.partial_cmp(&a).unwrap_or(Ordering::Equal),
        (a_nan, b_nan) => a_nan.cmp(&b_nan),
    }
}
