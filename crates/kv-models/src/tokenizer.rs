//! Text to tokens and back.

use std::path::Path;
use std::sync::Arc;

use crate::error::{ModelError, Result};

/// A model's tokenizer, from its `tokenizer.json`. Cloning is cheap.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`ModelError::Io`], [`ModelError::Tokenizer`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|source| ModelError::io(path, source))?;
        Self::from_bytes(&bytes).map_err(|error| match error {
            ModelError::Tokenizer { reason } => {
                ModelError::Tokenizer { reason: format!("`{}`: {reason}", path.display()) }
            }
            error => error,
        })
    }

    /// Reads the content of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(failed)?;
        // Some files carry the limits of their training: a prompt must neither be cut nor filled.
        inner.with_truncation(None).map_err(failed)?;
        inner.with_padding(None);
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The tokens of `text`; `add_special` adds what the tokenizer puts around a prompt (such as
    /// the token that starts a sequence). Special tokens spelled out in the text are recognised
    /// either way.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`].
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, add_special).map_err(failed)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `ids`; `skip_special` leaves special tokens out. Ids beyond the vocabulary have
    /// no text, bytes that are no UTF-8 become `U+FFFD`.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`].
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner.decode(ids, skip_special).map_err(failed)
    }

    /// Number of tokens, added ones included. A model's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The id of a token given by its exact spelling in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The content of the tokenizer's `tokenizer.json`.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`].
    pub fn to_json(&self) -> Result<String> {
        self.inner.to_string(false).map_err(failed)
    }

    /// Whether decoding looks at a token at all.
    fn has_text(&self, id: u32, skip_special: bool) -> bool {
        let special = |token: &str| self.inner.get_added_vocabulary().is_special_token(token);
        self.inner.id_to_token(id).is_some_and(|token| !(skip_special && special(&token)))
    }

    /// Whether a token is a single byte of text in the notation of byte fallback (`<0xE6>`).
    fn is_byte(&self, id: u32) -> bool {
        let byte = |token: String| {
            let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
            (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
        };
        self.inner.id_to_token(id).and_then(byte).is_some()
    }

    /// Starts to decode token by token.
    pub fn stream(&self, skip_special: bool) -> TextStream {
        TextStream {
            tokenizer: self.clone(),
            skip_special,
            ids: Vec::new(),
            emitted: 0,
            context: String::new(),
        }
    }
}

fn failed(error: tokenizers::Error) -> ModelError {
    ModelError::Tokenizer { reason: error.to_string() }
}

/// Decodes token by token, never splitting a character.
///
/// The pieces joined are what [`Tokenizer::decode`] gives for all tokens at once. Text that a later
/// token may change is held back: the end of a character of which bytes are still to come, and
/// bytes that are tokens of their own (byte fallback), which decode together.
#[derive(Debug, Clone)]
pub struct TextStream {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// The tokens of the last piece, then those whose text is held back.
    ids: Vec<u32>,
    /// How many of `ids` are of the last piece. They are kept because a token's text may depend
    /// on the one before it (a leading space, for some tokenizers).
    emitted: usize,
    /// The text of the last piece's tokens on their own.
    context: String,
}

impl TextStream {
    /// Adds a token; returns the text that is complete by it, if any.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`].
    pub fn push(&mut self, id: u32) -> Result<Option<String>> {
        if !self.tokenizer.has_text(id, self.skip_special) {
            return Ok(None);
        }
        self.ids.push(id);
        if self.tokenizer.is_byte(id) {
            return Ok(None);
        }
        let piece = self.held_back()?;
        // A replacement character at the end may be a character of which bytes are still to come.
        if piece.is_empty() || piece.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(None);
        }
        self.ids.drain(..self.emitted);
        self.emitted = self.ids.len();
        self.context = self.tokenizer.decode(&self.ids, self.skip_special)?;
        Ok(Some(piece))
    }

    /// The text that is held back, as it would be without any further token. Characters of which
    /// bytes are missing are `U+FFFD`.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`].
    pub fn held_back(&self) -> Result<String> {
        if self.ids.len() == self.emitted {
            return Ok(String::new());
        }
        let text = self.tokenizer.decode(&self.ids, self.skip_special)?;
        // A decoder may rewrite text across tokens. What has been returned stays as it is.
        let same = text.chars().zip(self.context.chars()).take_while(|(new, old)| new == old);
        let start = same.map(|(new, _)| new.len_utf8()).sum();
        Ok(text[start..].to_string())
    }

    /// Returns what is left: bytes of a character that never was completed, as `U+FFFD`. The
    /// stream is as new afterwards.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`].
    pub fn finish(&mut self) -> Result<Option<String>> {
        let rest = self.held_back()?;
        *self = self.tokenizer.stream(self.skip_special);
        Ok(Some(rest).filter(|rest| !rest.is_empty()))
    }
}

#[cfg(test)]
mod tests;
