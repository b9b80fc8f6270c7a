//! The tokens and their kinds.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::error::{GgufError, quoted};
use crate::metadata::Metadata;
use crate::model::TOKENS;

const KINDS: &str = "tokenizer.ggml.token_type";

/// What a token is for, as the file counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(u64)]
pub(crate) enum Kind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

/// The tokens of a file, each with another text.
pub(crate) struct Vocab<'a> {
    pub(crate) tokens: Vec<&'a str>,
    pub(crate) kinds: Vec<Kind>,
    pub(crate) ids: HashMap<&'a str, usize>,
}

impl<'a> Vocab<'a> {
    /// Reads the tokens. There are `size` of them.
    pub(crate) fn read(metadata: &'a Metadata, size: usize) -> Result<Self, GgufError> {
        let tokens = metadata.texts(TOKENS)?;
        let mut kinds = Vec::with_capacity(tokens.len());
        for number in metadata.whole_numbers(KINDS)? {
            kinds.push(Kind::from_repr(number).ok_or_else(|| GgufError::Value {
                key: KINDS.to_owned(),
                expected: "numbers from 1 to 6".to_owned(),
                actual: number.to_string(),
            })?);
        }
        check_len(TOKENS, tokens.len(), size)?;
        check_len(KINDS, kinds.len(), size)?;
        let mut ids = HashMap::with_capacity(tokens.len());
        for (second, token) in tokens.iter().enumerate() {
            if let Some(first) = ids.insert(*token, second) {
                let token = quoted(token);
                return Err(GgufError::DuplicateToken { token, first, second });
            }
        }
        Ok(Self { tokens, kinds, ids })
    }

    /// `vocab` of a model in `tokenizer.json`.
    pub(crate) fn to_json(&self) -> Value {
        let pairs = self.tokens.iter().enumerate();
        pairs.map(|(id, token)| ((*token).to_owned(), id.into())).collect::<Map<_, _>>().into()
    }

    /// `added_tokens` of `tokenizer.json`: those that are found in a text before it is split.
    pub(crate) fn added(&self, unknown_too: bool) -> Value {
        let kinds = self.tokens.iter().zip(&self.kinds).enumerate();
        let added = kinds.filter_map(|(id, (token, kind))| {
            let special = match kind {
                Kind::Control => true,
                Kind::Unknown if unknown_too => true,
                Kind::UserDefined => false,
                _ => return None,
            };
            // An empty text would be found everywhere.
            (!token.is_empty()).then(|| {
                json!({
                    "id": id, "content": token, "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false, "special": special,
                })
            })
        });
        added.collect::<Vec<_>>().into()
    }
}

/// Each list has one entry a token.
pub(crate) fn check_len(key: &str, actual: usize, size: usize) -> Result<(), GgufError> {
    if actual == size {
        return Ok(());
    }
    Err(GgufError::VocabSize { rows: size, key: key.to_owned(), actual })
}
