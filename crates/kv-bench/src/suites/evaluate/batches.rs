//! Questions that generate together.

use super::asked::Asked;

/// The questions in batches of at most `most`, by their numbers: neighbours in length, so that short
/// ones do not wait for long ones. Questions that are appended to a compressed context are of one
/// length in a batch, as a step appends a token to every sequence.
pub(super) fn batches(asked: &[Asked], aware: bool, most: usize) -> Vec<Vec<usize>> {
    let sizes: Vec<[usize; 2]> =
        asked.iter().map(|own| [own.appended(aware), own.tokens()]).collect();
    group(&sizes, most)
}

/// Groups numbers of items, whose sizes are the appended tokens and the prompt's.
fn group(sizes: &[[usize; 2]], most: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&index| sizes[index]);
    let equal = order.chunk_by(|&a, &b| sizes[a][0] == sizes[b][0]);
    equal.flat_map(|equal| equal.chunks(most).map(<[usize]>::to_vec)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_have_one_length_of_question_and_neighbouring_prompts() {
        let sizes = [[3, 900], [0, 70], [3, 100], [0, 50], [3, 500], [0, 60]];
        assert_eq!(group(&sizes, 2), [vec![3, 5], vec![1], vec![2, 4], vec![0]]);
        assert_eq!(group(&sizes, 8), [vec![3, 5, 1], vec![2, 4, 0]]);
        assert!(group(&[], 4).is_empty());
    }
}
