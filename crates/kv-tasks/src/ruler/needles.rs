//! Needles in a haystack: `niah_*` of RULER.

use std::collections::HashSet;

use rand::Rng;
use rand::seq::{SliceRandom, index};
use serde::Deserialize;

use super::haystack::{Essay, NOISE};
use super::{Generate, Prompt, words};
use crate::{QuestionOptions, TaskError, random};

/// A retrieval task: what needles there are, and in what they are hidden.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Needles {
    haystack: Haystack,
    keys: Kind,
    values: Kind,
    /// Keys in the text.
    key_count: usize,
    /// Values of each key.
    value_count: usize,
    /// Keys that are asked for.
    query_count: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Haystack {
    /// The same sentences again and again.
    Noise,
    /// A text of the user's.
    Essay,
    /// Other needles.
    Needle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Words,
    Numbers,
    Uuids,
}

impl Kind {
    fn draw(self, random: &mut impl Rng) -> String {
        match self {
            Self::Words => words::word(random),
            Self::Numbers => words::number(random),
            Self::Uuids => words::uuid(random),
        }
    }

    fn plural(self) -> &'static str {
        match self {
            Self::Words => "words",
            Self::Numbers => "numbers",
            Self::Uuids => "uuids",
        }
    }

    fn singular(self) -> &'static str {
        self.plural().trim_end_matches('s')
    }
}

impl Needles {
    pub(super) fn generator<'n>(
        &'n self,
        task: &str,
        options: &QuestionOptions,
    ) -> Result<Generator<'n>, TaskError> {
        let essay = match (self.haystack, &options.text) {
            (Haystack::Essay, Some(path)) => Some(Essay::read(path)?),
            (Haystack::Essay, None) => {
                return Err(TaskError::NoText { task: task.to_owned() });
            }
            _ => None,
        };
        Ok(Generator { needles: self, essay, seed: options.seed })
    }

    pub(super) fn fault(&self) -> Option<(&'static str, &'static str, String)> {
        let count = self.key_count.max(self.query_count).saturating_mul(self.value_count);
        if self.value_count == 0 || self.query_count == 0 || count > DEPTHS {
            let key = "ruler.key_count * value_count";
            return Some((key, "1 to 40 needles, and at least one query", count.to_string()));
        }
        None
    }

    fn needle(&self, key: &str, value: &str) -> String {
        format!("One of the special magic {} for {key} is: {value}.", self.values.plural())
    }

    fn count(&self) -> usize {
        self.key_count.max(self.query_count) * self.value_count
    }
}

/// Needles are hidden at some of these depths, in equal steps from start to end.
const DEPTHS: usize = 40;

pub(super) struct Generator<'n> {
    needles: &'n Needles,
    essay: Option<Essay>,
    seed: u64,
}

impl Generate for Generator<'_> {
    fn least(&self, _question: usize) -> usize {
        self.needles.count()
    }

    fn prompt(&self, question: usize, size: usize) -> Prompt {
        let task = self.needles;
        let mut random = random::stream(self.seed, "needles", question);
        let mut used = HashSet::new();
        let mut key = |random: &mut _| loop {
            let key = task.keys.draw(random);
            if used.insert(key.clone()) {
                return key;
            }
        };
        let (mut keys, mut values, mut needles) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..task.key_count.max(task.query_count) {
            let key = key(&mut random);
            let drawn: Vec<_> =
                (0..task.value_count).map(|_| task.values.draw(&mut random)).collect();
            needles.extend(drawn.iter().map(|value| task.needle(&key, value)));
            keys.push(key);
            values.push(drawn);
        }
        needles.shuffle(&mut random);
        let queries = index::sample(&mut random, keys.len(), task.query_count).into_vec();

        let mut places = random::stream(self.seed, "places of needles", question);
        let haystack = match (task.haystack, &self.essay) {
            (Haystack::Essay, Some(essay)) => {
                let depths = index::sample(&mut places, DEPTHS, needles.len()).into_vec();
                hidden_in_essay(essay, size, &needles, depths)
            }
            (Haystack::Needle, _) => {
                let mut random = random::stream(self.seed, "other needles", question);
                let others = (0..size).map(|_| {
                    let key = key(&mut random);
                    task.needle(&key, &task.values.draw(&mut random))
                });
                hidden_in_lines(others.collect(), &needles, &mut places)
            }
            _ => hidden_in_lines(vec![NOISE.to_owned(); size], &needles, &mut places),
        };
        let asked: Vec<&str> = queries.iter().map(|&key| keys[key].as_str()).collect();
        let references = queries.iter().flat_map(|&key| values[key].clone()).collect();
        self.asked(&haystack, &asked, references)
    }
}

impl Generator<'_> {
    fn asked(&self, haystack: &str, queries: &[&str], references: Vec<String>) -> Prompt {
        let query = match queries {
            [others @ .., last] if !others.is_empty() => {
                format!("{}, and {last}", others.join(", "))
            }
            _ => queries.concat(),
        };
        let one = self.needles.query_count * self.needles.value_count == 1;
        let kind = self.needles.values;
        let (kind, some, are, are_all) = match one {
            true => (kind.singular(), "A", "is", "is"),
            false => (kind.plural(), "Some", "are", "are all"),
        };
        Prompt {
            context: format!(
                "{some} special magic {kind} {are} hidden within the following text. Make sure to \
                 memorize it. I will quiz you about the {kind} afterwards.\n{haystack}"
            ),
            question: format!(
                "\nWhat {are_all} the special magic {kind} for {query} mentioned in the provided \
                 text?"
            ),
            answer_prefix: format!(
                " The special magic {kind} for {query} mentioned in the provided text {are}"
            ),
            references,
        }
    }
}

/// The essay with the needles between its sentences, each at one of the depths.
fn hidden_in_essay(
    essay: &Essay,
    words: usize,
    needles: &[String],
    mut depths: Vec<usize>,
) -> String {
    let sentences = essay.sentences(words);
    depths.sort_unstable();
    let mut text = String::new();
    let mut last = 0;
    for (needle, depth) in needles.iter().zip(depths) {
        // RULER rounds the depth to a percentage, then the sentence down.
        let percent = (100 * depth + (DEPTHS - 1) / 2) / (DEPTHS - 1);
        let sentence = sentences.len() * percent / 100;
        let next = sentences.get(sentence).copied().unwrap_or(words);
        essay.push(&mut text, last, next);
        text.push(' ');
        text.push_str(needle);
        text.push(' ');
        last = next;
    }
    essay.push(&mut text, last, words);
    text
}

/// The lines with the needles in front of some of them.
fn hidden_in_lines(lines: Vec<String>, needles: &[String], random: &mut impl Rng) -> String {
    let mut places = index::sample(random, lines.len(), needles.len()).into_vec();
    places.sort_unstable();
    let mut places = places.into_iter().zip(needles).peekable();
    let mut all = Vec::with_capacity(lines.len() + needles.len());
    for (number, line) in lines.into_iter().enumerate() {
        if let Some((_, needle)) = places.next_if(|(place, _)| *place == number) {
            all.push(needle.clone());
        }
        all.push(line);
    }
    all.join("\n")
}
