//! Common words: `cwe` of RULER.

use rand::seq::SliceRandom;
use serde::Deserialize;

use super::{Generate, Prompt, words};
use crate::random;

/// A numbered list of words, in which some are more common than others.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CommonWords {
    /// How many words are common.
    common: usize,
    /// How often a common word occurs.
    common_repeats: usize,
    /// How often any other word occurs.
    other_repeats: usize,
}

/// Below this length RULER's numbers are smaller.
const SHORT: usize = 4096;

impl CommonWords {
    pub(super) fn generator(&self, seed: u64, length: usize) -> Generator {
        let (example, list) = match length < SHORT {
            true => (Numbers::new(20, 3, 1), Numbers::new(0, 6, 1)),
            false => {
                let repeats = (self.common_repeats, self.other_repeats);
                (Numbers::new(40, 10, 3), Numbers::new(0, repeats.0, repeats.1))
            }
        };
        Generator { common: self.common, example, list, seed }
    }

    pub(super) fn fault(&self) -> Option<(&'static str, &'static str, String)> {
        let repeats = self.common_repeats > self.other_repeats && self.other_repeats > 0;
        if self.common == 0 || self.common > 20 || !repeats {
            let numbers = format!(
                "{} words, {} times and {} times",
                self.common, self.common_repeats, self.other_repeats
            );
            let expected = "1 to 20 common words, more often than others, which occur";
            return Some(("ruler.common and repeats", expected, numbers));
        }
        None
    }
}

/// Words of a list, and how often the common ones and the others occur.
#[derive(Clone, Copy)]
struct Numbers {
    words: usize,
    common_repeats: usize,
    other_repeats: usize,
}

impl Numbers {
    fn new(words: usize, common_repeats: usize, other_repeats: usize) -> Self {
        Self { words, common_repeats, other_repeats }
    }
}

pub(super) struct Generator {
    common: usize,
    example: Numbers,
    list: Numbers,
    seed: u64,
}

impl Generate for Generator {
    fn least(&self, _question: usize) -> usize {
        self.common
    }

    fn prompt(&self, question: usize, size: usize) -> Prompt {
        let example = self.asked("common words of the example", question, self.example);
        let list = Numbers { words: size, ..self.list };
        let prompt = self.asked("common words", question, list);
        let solved = format!("{} {}", example.text(), numbered(&example.references));
        Prompt { context: format!("{solved}\n{}", prompt.context), ..prompt }
    }
}

impl Generator {
    fn asked(&self, purpose: &str, question: usize, numbers: Numbers) -> Prompt {
        let mut random = random::stream(self.seed, purpose, question);
        let mut known = words::all().to_vec();
        known.shuffle(&mut random);
        let mut words: Vec<String> =
            known.into_iter().take(numbers.words).map(str::to_owned).collect();
        // Very long lists need more words than there are: pairs of words serve too.
        words.extend((words.len()..numbers.words).map(|_| words::word(&mut random)));

        let (common, others) = words.split_at(self.common.min(words.len()));
        let repeated = |words: &[String], repeats| {
            std::iter::repeat_n(words.to_vec(), repeats).flatten().collect::<Vec<_>>()
        };
        let mut list = repeated(common, numbers.common_repeats);
        list.extend(repeated(others, numbers.other_repeats));
        list.shuffle(&mut random);
        let count = self.common;
        Prompt {
            context: format!(
                "Below is a numbered list of words. In these words, some appear more often than \
                 others. Memorize the ones that appear most often.\n{}",
                numbered(&list)
            ),
            question: format!(
                "\nQuestion: What are the {count} most common words in the above list?"
            ),
            answer_prefix: format!(
                " Answer: The top {count} words that appear most often in the list are:"
            ),
            references: common.to_vec(),
        }
    }
}

fn numbered(words: &[String]) -> String {
    let numbered = words.iter().enumerate().map(|(index, word)| format!("{}. {word}", index + 1));
    numbered.collect::<Vec<_>>().join(" ")
}
