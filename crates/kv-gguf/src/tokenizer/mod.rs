//! `tokenizer.json` in Hugging Face's form.

mod bpe;
mod pre_tokenizer;
mod sentencepiece;
mod special;
mod vocab;

use serde_json::Value;

use crate::error::{GgufError, quoted};
use crate::metadata::Metadata;

const MODEL: &str = "tokenizer.ggml.model";

/// The tokenizer of a model of `size` tokens.
pub(crate) fn tokenizer(metadata: &Metadata, size: usize) -> Result<Value, GgufError> {
    match metadata.required_text(MODEL)? {
        "gpt2" => bpe::tokenizer(metadata, size),
        "llama" => sentencepiece::tokenizer(metadata, size),
        other => Err(GgufError::Value {
            key: MODEL.to_owned(),
            expected: "gpt2 (BPE) or llama (SentencePiece)".to_owned(),
            actual: quoted(other),
        }),
    }
}
