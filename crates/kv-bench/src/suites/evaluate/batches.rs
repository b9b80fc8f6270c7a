//! Questions that generate together.

use super::asked::Asked;

/// The questions in batches of at most `most`, by their numbers: neighbours in length, so that
/// short ones do not wait for long ones. Questions that are appended to a compressed context are of
/// one length in a batch, as a step appends a token to every sequence; those without a context are
/// left out then.
pub(super) fn batches(asked: &[Asked], aware: bool, most: usize) -> Vec<Vec<usize>> {
    let sizes: Vec<Option<[usize; 2]>> = asked
        .iter()
        .map(|own| (aware || own.has_context()).then(|| [own.appended(aware), own.tokens()]))
        .collect();
    group(&sizes, most)
}

/// Groups numbers of items, whose sizes are the appended tokens and the prompt's.
fn group(sizes: &[Option<[usize; 2]>], most: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..sizes.len()).filter(|&index| sizes[index].is_some()).collect();
    order.sort_by_key(|&index| sizes[index]);
    let appended = |index: usize| sizes[index].map(|[appended, _]| appended);
    let equal = order.chunk_by(|&a, &b| appended(a) == appended(b));
    equal.flat_map(|equal| equal.chunks(most).map(<[usize]>::to_vec)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_have_one_length_of_question_and_neighbouring_prompts() {
        let sizes = [[3, 900], [0, 70], [3, 100], [0, 50], [3, 500], [0, 60]].map(Some);
        assert_eq!(group(&sizes, 2), [vec![3, 5], vec![1], vec![2, 4], vec![0]]);
        assert_eq!(group(&[None, Some([0, 1])], 2), [vec![1]]);
        assert_eq!(group(&sizes, 8), [vec![3, 5, 1], vec![2, 4, 0]]);
        assert!(group(&[], 4).is_empty());
    }
}
