//! The rule by which all choices rank scores.

use std::cmp::Ordering;

/// All indices by score, highest first; equal scores by lower index; NaN last.
pub fn rank(scores: &[f32]) -> Vec<u32> {
    let mut keys: Vec<u64> = keys(scores).collect();
    keys.sort_unstable();
    keys.into_iter().map(index_of).collect()
}

/// The indices of the `count` highest scores, ascending; among equal scores the lower index wins.
pub fn top(scores: &[f32], count: usize) -> Vec<u32> {
    if count >= scores.len() {
        return (0..scores.len() as u32).collect();
    }
    let mut keys: Vec<u64> = keys(scores).collect();
    if count > 0 {
        keys.select_nth_unstable(count - 1);
    }
    keys.truncate(count);
    let mut best: Vec<u32> = keys.into_iter().map(index_of).collect();
    best.sort_unstable();
    best
}

/// Sort keys that ascend from the best score to the worst. Each contains its score's index.
/// Integers are compared faster than floats.
fn keys(scores: &[f32]) -> impl Iterator<Item = u64> {
    (0u64..).zip(scores).map(|(index, &score)| (u64::from(rank_bits(score)) << 32) | index)
}

fn index_of(key: u64) -> u32 {
    key as u32
}

/// Bits that ascend from the highest float to the lowest, equal for equal ones (`-0.0` and `0.0`
/// too), NaN last.
fn rank_bits(score: f32) -> u32 {
    if score.is_nan() {
        return u32::MAX;
    }
    // `-0.0` becomes `0.0`.
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 0 { !bits & (u32::MAX >> 1) } else { bits }
}

/// Higher first, by [`rank_bits`].
pub(crate) fn descending(a: f32, b: f32) -> Ordering {
    rank_bits(a).cmp(&rank_bits(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_index() {
        assert_eq!(top(&[1.0, 2.0, 2.0, 2.0, 0.0], 2), [1, 2]);
        assert_eq!(top(&[0.0, -0.0, 0.0], 1), [0]);
        assert_eq!(rank(&[1.0, f32::NAN, 3.0]), [2, 0, 1]);
    }

    #[test]
    fn bits_rank_as_floats_compare() {
        let (tiny, most) = (f32::from_bits(1), f32::MAX);
        let finite = [0.0, -0.0, tiny, -tiny, 1.0, -1.0, 1.5, -1.5, most, -most];
        let all = [&finite[..], &[f32::INFINITY, f32::NEG_INFINITY]].concat();
        for &a in &all {
            for &b in &all {
                assert_eq!(Some(descending(a, b)), b.partial_cmp(&a), "{a} and {b}");
            }
            assert_eq!(descending(a, f32::NAN), Ordering::Less, "{a}");
        }
        assert_eq!(descending(f32::NAN, -f32::NAN), Ordering::Equal);
    }
}
