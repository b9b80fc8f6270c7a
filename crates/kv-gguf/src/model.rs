//! The dimensions of the model.

use crate::error::{GgufError, quoted};
use crate::layout::Stored;
use crate::metadata::Metadata;

const ARCHITECTURE: &str = "llama";
const PARTS: &str = "split.count";
pub(crate) const TOKENS: &str = "tokenizer.ggml.tokens";

/// The dimensions of a Llama model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) vocab: usize,
}

impl Model {
    /// The dimensions by the metadata, checked against each other.
    pub(crate) fn read(metadata: &Metadata, stored: &[Stored]) -> Result<Self, GgufError> {
        let architecture = metadata.required_text("general.architecture")?;
        if architecture != ARCHITECTURE {
            let actual = quoted(architecture);
            return Err(GgufError::Architecture { actual, supported: ARCHITECTURE });
        }
        if let Some(parts) = metadata.unsigned(PARTS)?.filter(|parts| *parts > 1) {
            return Err(value(PARTS, parts, "1: models of several files are not supported".into()));
        }
        let (heads_key, kv_key) = ("llama.attention.head_count", "llama.attention.head_count_kv");
        let (hidden, heads) =
            (metadata.required_size("llama.embedding_length")?, metadata.required_size(heads_key)?);
        let kv_heads = metadata.size(kv_key)?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(value(kv_key, kv_heads, format!("a divisor of {heads}, the query heads")));
        }
        let model = Self {
            hidden,
            intermediate: metadata.required_size("llama.feed_forward_length")?,
            layers: metadata.required_size("llama.block_count")?,
            heads,
            kv_heads,
            head_dim: head_dim(metadata, hidden, heads)?,
            vocab: vocab(metadata, stored)?,
        };
        match metadata.unsigned("llama.expert_count")? {
            Some(experts) if experts > 0 => {
                Err(value("llama.expert_count", experts, "0: experts are not supported".into()))
            }
            _ => Ok(model),
        }
    }
}

/// Keys, values and the rotated part of a head are equally wide.
fn head_dim(metadata: &Metadata, hidden: usize, heads: usize) -> Result<usize, GgufError> {
    let (length, key) = ("llama.attention.key_length", "llama.attention.head_count");
    let head_dim = match metadata.size(length)? {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(value(key, heads, format!("a divisor of {hidden}, the hidden size"))),
    };
    if !head_dim.is_multiple_of(2) {
        return Err(match metadata.has(length) {
            true => value(length, head_dim, "an even number".into()),
            false => value(key, heads, format!("heads of an even part of {hidden}")),
        });
    }
    for key in ["llama.attention.value_length", "llama.rope.dimension_count"] {
        if let Some(other) = metadata.size(key)?.filter(|other| *other != head_dim) {
            return Err(value(key, other, format!("{head_dim}, the width of a key")));
        }
    }
    Ok(head_dim)
}

/// The rows of the embedding, which the metadata must agree with.
fn vocab(metadata: &Metadata, stored: &[Stored]) -> Result<usize, GgufError> {
    let name = "token_embd.weight";
    let embedding = stored.iter().find(|tensor| tensor.name == name);
    let embedding = embedding.ok_or_else(|| GgufError::MissingTensor { name: name.to_owned() })?;
    let rows = embedding.shape[0];
    let said = [
        ("llama.vocab_size", metadata.size("llama.vocab_size")?),
        (TOKENS, metadata.list_len(TOKENS)?),
    ];
    for (key, actual) in said {
        if let Some(actual) = actual.filter(|actual| *actual != rows) {
            return Err(GgufError::VocabSize { rows, key: key.to_owned(), actual });
        }
    }
    Ok(rows)
}

fn value(key: &str, actual: impl ToString, expected: String) -> GgufError {
    GgufError::Value { key: key.to_owned(), actual: actual.to_string(), expected }
}
