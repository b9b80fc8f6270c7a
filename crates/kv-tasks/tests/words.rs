//! Tokenizers of the tests.

use std::cell::RefCell;

use kv_tasks::Tokens;

/// A token is a word with the white space after it, so that decoding gives the text back.
#[derive(Default)]
pub(crate) struct Words {
    known: RefCell<Vec<String>>,
}

impl Tokens for Words {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let mut known = self.known.borrow_mut();
        let words = text.split_inclusive(char::is_whitespace);
        Ok(words
            .map(|word| {
                let position = known.iter().rposition(|other| other == word);
                let position = position.unwrap_or_else(|| {
                    known.push(word.to_owned());
                    known.len() - 1
                });
                u32::try_from(position).expect("few words")
            })
            .collect())
    }

    fn decode(&self, ids: &[u32]) -> Result<String, String> {
        let known = self.known.borrow();
        Ok(ids.iter().map(|&id| known[id as usize].as_str()).collect())
    }
}
