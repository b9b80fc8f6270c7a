//! The tokenizer of a model, as far as tasks need it.

/// The tokenizer of a model, as far as tasks need it: to generate a prompt of a length, and to cut
/// one to a length.
pub trait Tokens {
    /// The tokens of a text.
    ///
    /// # Errors
    /// The tokenizer's own message.
    fn encode(&self, text: &str) -> Result<Vec<u32>, String>;

    /// The text of tokens, without special tokens.
    ///
    /// # Errors
    /// The tokenizer's own message.
    fn decode(&self, ids: &[u32]) -> Result<String, String>;
}
