//! Choices of a question in a random order.

use minijinja::Value;
use rand::seq::SliceRandom;
use serde::Deserialize;

use crate::random;

/// The choices of a question, which are shown in a random order. Templates then have the variables
/// `choices`, the texts in that order, and `letter`, the correct one's letter.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Choices {
    /// An expression for the list of texts.
    pub(crate) texts: String,
    /// The position of the correct one in that list, from 0.
    pub(crate) correct: usize,
}

impl Choices {
    /// The texts in a random order, and the letter of the correct one.
    pub(crate) fn shuffle(&self, texts: Vec<String>, seed: u64, question: usize) -> (Value, Value) {
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.shuffle(&mut random::stream(seed, "choices", question));
        let position = order.iter().position(|&text| text == self.correct).unwrap_or_default();
        let letter = char::from(b'A' + (position % 26) as u8);
        let shown: Vec<&String> = order.iter().map(|&text| &texts[text]).collect();
        (Value::from_serialize(shown), Value::from(letter.to_string()))
    }
}
