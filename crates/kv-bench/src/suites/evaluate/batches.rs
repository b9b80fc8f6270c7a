//! Questions that generate together.

use super::asked::Asked;

/// Questions, by their numbers, that share one pass of the model over their prompts.
#[derive(Debug, PartialEq)]
pub(super) enum Batch {
    /// Questions with prompts of their own, which generate as one batch of sequences.
    Prompts(Vec<usize>),
    /// Questions on one context, those with equally many tokens side by side. The context is
    /// prefilled and compressed once, and questions are appended to copies of its cache.
    Context(Vec<usize>),
}

impl Batch {
    pub(super) fn questions(&self) -> &[usize] {
        match self {
            Self::Prompts(questions) | Self::Context(questions) => questions,
        }
    }
}

/// What decides about a question's batch.
struct Item<'a> {
    /// The context to compress without the question in sight.
    context: Option<&'a [u32]>,
    /// Tokens that are appended to the compressed prompt.
    appended: usize,
    /// Tokens to keep room for behind the compressed prompt.
    room: usize,
    /// Tokens of the whole prompt.
    tokens: usize,
}

/// The questions in batches.
///
/// All questions of a batch have one room. Where the question is not in sight, all questions on one
/// context are a batch of their own. All others are grouped by at most `most` neighbours in length,
/// so that short ones do not wait for long ones. Questions that are appended to compressed contexts
/// are of one length in such a batch, as a step appends a token to every sequence. Questions
/// without a context are left out then.
pub(super) fn batches(asked: &[Asked], aware: bool, most: usize) -> Vec<Batch> {
    let items: Vec<Option<Item<'_>>> = asked
        .iter()
        .map(|own| {
            let item = Item {
                context: own.context().filter(|_| !aware),
                appended: own.appended(aware),
                room: own.room(aware),
                tokens: own.tokens(),
            };
            (aware || item.context.is_some()).then_some(item)
        })
        .collect();
    group(&items, most)
}

fn group(items: &[Option<Item<'_>>], most: usize) -> Vec<Batch> {
    let present = items.iter().enumerate();
    let mut present: Vec<(usize, &Item<'_>)> =
        present.filter_map(|(index, item)| item.as_ref().map(|item| (index, item))).collect();
    present.sort_by_key(|(index, item)| (item.context, item.room, item.appended, *index));
    let (mut batches, mut single) = (Vec::new(), Vec::new());
    for equal in present.chunk_by(|(_, a), (_, b)| (a.context, a.room) == (b.context, b.room)) {
        if equal.len() > 1 && equal[0].1.context.is_some() {
            batches.push(Batch::Context(equal.iter().map(|(index, _)| *index).collect()));
        } else {
            single.extend_from_slice(equal);
        }
    }
    single.sort_by_key(|(index, item)| (item.appended, item.room, item.tokens, *index));
    let alike = |a: &Item<'_>, b: &Item<'_>| (a.appended, a.room) == (b.appended, b.room);
    for equal in single.chunk_by(|(_, a), (_, b)| alike(a, b)) {
        let chunks = equal.chunks(most);
        batches.extend(
            chunks.map(|chunk| Batch::Prompts(chunk.iter().map(|(index, _)| *index).collect())),
        );
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_have_one_length_of_question_and_neighbouring_prompts() {
        let item = |appended, tokens| Some(Item { context: None, appended, room: 256, tokens });
        let sizes = [[3, 900], [0, 70], [3, 100], [0, 50], [3, 500], [0, 60]];
        let mut items = sizes.map(|[appended, tokens]| item(appended, tokens));
        let grouped = |items: &[Option<Item<'_>>], most| -> Vec<Vec<usize>> {
            group(items, most).iter().map(|batch| batch.questions().to_vec()).collect()
        };
        assert_eq!(grouped(&items, 2), [vec![3, 5], vec![1], vec![2, 4], vec![0]]);
        assert_eq!(grouped(&items, 8), [vec![3, 5, 1], vec![2, 4, 0]]);
        items[5].as_mut().unwrap().room = 512;
        assert_eq!(grouped(&items, 8), [vec![3, 1], vec![5], vec![2, 4, 0]]);
        assert_eq!(group(&[None, item(0, 1)], 2), [Batch::Prompts(vec![1])]);
        assert!(group(&[], 4).is_empty());
    }

    #[test]
    fn questions_on_one_context_are_a_batch_whatever_their_lengths() {
        let contexts: [&[u32]; 6] = [&[1, 2], &[1, 2, 3], &[1, 2], &[7], &[1, 2], &[1, 2]];
        let sizes = [[6, 256], [4, 256], [4, 256], [4, 256], [6, 256], [6, 512]];
        let items: Vec<_> = contexts
            .iter()
            .zip(sizes)
            .map(|(&context, [appended, room])| {
                let tokens = context.len() + appended;
                Some(Item { context: Some(context), appended, room, tokens })
            })
            .collect();
        let batches = group(&items, 2);
        let single = [Batch::Prompts(vec![3, 1]), Batch::Prompts(vec![5])];
        assert_eq!(batches[0], Batch::Context(vec![2, 0, 4]));
        assert_eq!(batches[1..], single);
    }
}
