//! How a text is split before byte-pair encoding.
//!
//! A file names the rule. The patterns are those of the models' own `tokenizer.json`, which
//! llama.cpp quotes in `llama-vocab.cpp`.

use serde_json::{Value, json};

use crate::error::{GgufError, quoted};
use crate::metadata::Metadata;

const KEY: &str = "tokenizer.ggml.pre";

const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// What differs between byte-level tokenizers.
pub(crate) struct Rule {
    /// `normalizer` of `tokenizer.json`.
    pub(crate) normalizer: Value,
    /// `pre_tokenizer` of `tokenizer.json`.
    pub(crate) pre_tokenizer: Value,
    /// Whether a piece that is a token is kept whole, whatever the merges say.
    pub(crate) ignore_merges: bool,
    /// Whether a text begins with the first token where the file does not say.
    pub(crate) begins: bool,
}

impl Rule {
    /// The rule that the metadata name.
    pub(crate) fn read(metadata: &Metadata) -> Result<Self, GgufError> {
        let plain = Self {
            normalizer: Value::Null,
            pre_tokenizer: Value::Null,
            ignore_merges: false,
            begins: false,
        };
        Ok(match metadata.required_text(KEY)? {
            "gpt-2" => Self { pre_tokenizer: byte_level(true), ..plain },
            "smollm" | "starcoder" | "refact" | "codeshell" => {
                let digits = json!({"type": "Digits", "individual_digits": true});
                Self { pre_tokenizer: sequence([digits, byte_level(true)]), ..plain }
            }
            "llama-bpe" | "llama-v3" | "llama3" => {
                Self { ignore_merges: true, begins: true, ..plain.split(LLAMA3) }
            }
            "smaug-bpe" => plain.split(LLAMA3),
            "qwen2" | "deepseek-r1-qwen" => {
                Self { normalizer: json!({"type": "NFC"}), ..plain.split(QWEN2) }
            }
            "tekken" => Self { ignore_merges: true, begins: true, ..plain.split(TEKKEN) },
            other => {
                let expected = "one of gpt-2, smollm, starcoder, refact, codeshell, \
                    llama-bpe, llama-v3, llama3, smaug-bpe, qwen2, deepseek-r1-qwen, tekken";
                return Err(GgufError::Value {
                    key: KEY.to_owned(),
                    expected: expected.to_owned(),
                    actual: quoted(other),
                });
            }
        })
    }

    fn split(self, pattern: &str) -> Self {
        let split = json!({
            "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false,
        });
        Self { pre_tokenizer: sequence([split, byte_level(false)]), ..self }
    }
}

/// Bytes as letters; `split` is GPT-2's own rule.
pub(crate) fn byte_level(split: bool) -> Value {
    json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": split,
    })
}

fn sequence(steps: [Value; 2]) -> Value {
    json!({"type": "Sequence", "pretokenizers": steps})
}
