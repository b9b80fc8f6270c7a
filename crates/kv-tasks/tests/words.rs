//! Tokenizers of the tests.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;

use kv_tasks::Tokens;

/// A token is a word with the white space after it, so that decoding gives the text back.
#[derive(Default)]
pub(crate) struct Words {
    known: RefCell<Vec<String>>,
    numbers: RefCell<HashMap<String, u32>>,
}

impl Tokens for Words {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let (mut known, mut numbers) = (self.known.borrow_mut(), self.numbers.borrow_mut());
        let words = text.split_inclusive(char::is_whitespace);
        Ok(words
            .map(|word| {
                *numbers.entry(word.to_owned()).or_insert_with(|| {
                    known.push(word.to_owned());
                    u32::try_from(known.len() - 1).expect("few words")
                })
            })
            .collect())
    }

    fn decode(&self, ids: &[u32]) -> Result<String, String> {
        let known = self.known.borrow();
        Ok(ids.iter().map(|&id| known[id as usize].as_str()).collect())
    }
}

/// The tokenizer of a model, if the repository has one.
pub(crate) struct Pieces(tokenizers::Tokenizer);

impl Pieces {
    pub(crate) fn load() -> Option<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let path = folder.join("../kv-models/assets/needle-1m/tokenizer.json");
        tokenizers::Tokenizer::from_file(path).ok().map(Self)
    }
}

impl Tokens for Pieces {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let encoded = self.0.encode_fast(text, false).map_err(|error| error.to_string())?;
        Ok(encoded.get_ids().to_vec())
    }

    fn decode(&self, ids: &[u32]) -> Result<String, String> {
        self.0.decode(ids, true).map_err(|error| error.to_string())
    }
}
