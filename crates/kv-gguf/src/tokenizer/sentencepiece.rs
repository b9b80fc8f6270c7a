//! SentencePiece's byte-pair encoding, which files call `llama`.
//!
//! SentencePiece merges the adjacent pair whose concatenation has the highest score. A file has the
//! scores; `tokenizer.json` has the pairs in the order of their concatenations' scores.

use std::cmp::Reverse;

use serde_json::{Value, json};

use super::special::post_processor;
use super::vocab::{Kind, Vocab, check_len};
use crate::GgufError;
use crate::metadata::Metadata;
use crate::model::TOKENS;

const SCORES: &str = "tokenizer.ggml.scores";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const SPACES: &str = "tokenizer.ggml.remove_extra_whitespaces";
/// Stands for a space.
const SPACE: &str = "\u{2581}";
/// Bytes of the longest token that is split into pairs: the work grows with the square.
const LONGEST: usize = 512;

pub(crate) fn tokenizer(metadata: &Metadata, size: usize) -> Result<Value, GgufError> {
    let vocab = Vocab::read(metadata, size)?;
    if metadata.flag(SPACES, false)? {
        let (key, expected) = (SPACES.to_owned(), "false".to_owned());
        return Err(GgufError::Value { key, expected, actual: "true".to_owned() });
    }
    let unknown = match metadata.token(UNKNOWN, size)? {
        Some(id) => Some(id),
        None => vocab.kinds.iter().position(|kind| *kind == Kind::Unknown),
    };
    let prefix = metadata.flag("tokenizer.ggml.add_space_prefix", true)?;
    let replace = |from: &str, to: &str| {
        json!({
            "type": "Replace", "pattern": {"String": from}, "content": to,
        })
    };
    let mut normalizers = vec![replace(" ", SPACE)];
    let mut decoders =
        vec![replace(SPACE, " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocab.added(true),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "post_processor": post_processor(metadata, &vocab, true)?,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": unknown.map(|id| vocab.tokens[id]),
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": true,
            "byte_fallback": true,
            "ignore_merges": false,
            "vocab": vocab.to_json(),
            "merges": merges(metadata, &vocab)?,
        },
    }))
}

/// All pairs of tokens whose concatenation is a normal token, in the order in which they merge.
fn merges<'a>(metadata: &Metadata, vocab: &Vocab<'a>) -> Result<Vec<[&'a str; 2]>, GgufError> {
    let scores = metadata.numbers(SCORES)?;
    check_len(SCORES, scores.len(), vocab.tokens.len())?;
    if let Some(score) = scores.iter().find(|score| !score.is_finite()) {
        let (key, expected) = (SCORES.to_owned(), "finite numbers".to_owned());
        return Err(GgufError::Value { key, expected, actual: score.to_string() });
    }
    let mut ordered: Vec<usize> =
        (0..scores.len()).filter(|id| vocab.kinds[*id] == Kind::Normal).collect();
    ordered.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    let mut merges = Vec::new();
    for id in ordered {
        let token = vocab.tokens[id];
        if token.len() > LONGEST {
            return Err(GgufError::Value {
                key: TOKENS.to_owned(),
                expected: format!("tokens of at most {LONGEST} bytes"),
                actual: format!("a list with one of {} bytes", token.len()),
            });
        }
        let splits = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let known = |part: &str| vocab.ids.contains_key(part);
        let before = merges.len();
        merges.extend(
            splits.filter(|(left, right)| known(left) && known(right)).map(<[&str; 2]>::from),
        );
        merges[before..].sort_by_key(|[left, _]: &[&str; 2]| Reverse(left.len()));
    }
    Ok(merges)
}
