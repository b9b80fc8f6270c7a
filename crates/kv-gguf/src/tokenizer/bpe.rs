//! Byte-level byte-pair encoding, which files call `gpt2`.

use serde_json::{Value, json};

use super::pre_tokenizer::{Rule, byte_level};
use super::special::post_processor;
use super::vocab::Vocab;
use crate::error::{GgufError, quoted};
use crate::metadata::Metadata;

pub(crate) fn tokenizer(metadata: &Metadata, size: usize) -> Result<Value, GgufError> {
    let vocab = Vocab::read(metadata, size)?;
    let rule = Rule::read(metadata)?;
    let merges = metadata.texts("tokenizer.ggml.merges")?;
    let merges = merges.into_iter().enumerate().map(|(index, merge)| pair(index, merge, &vocab));
    let merges: Vec<[&str; 2]> = merges.collect::<Result<_, _>>()?;
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocab.added(false),
        "normalizer": rule.normalizer,
        "pre_tokenizer": rule.pre_tokenizer,
        "post_processor": post_processor(metadata, &vocab, rule.begins)?,
        "decoder": byte_level(true),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": rule.ignore_merges,
            "vocab": vocab.to_json(),
            "merges": merges,
        },
    }))
}

/// The two tokens of a merge. A token has no spaces, since bytes are written as letters.
fn pair<'a>(index: usize, merge: &'a str, vocab: &Vocab<'_>) -> Result<[&'a str; 2], GgufError> {
    let known = |token: &str| vocab.ids.contains_key(token);
    match merge.split_once(' ') {
        Some((left, right)) if known(left) && known(right) && known(&[left, right].concat()) => {
            Ok([left, right])
        }
        _ => Err(GgufError::Merge { index, merge: quoted(merge) }),
    }
}
