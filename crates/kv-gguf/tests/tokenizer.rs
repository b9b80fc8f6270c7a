//! Tokens of texts, compared with Hugging Face's tokenizers and SentencePiece.

use kv_gguf::{GgufError, GgufFile};
use serde::Deserialize;
use tokenizers::Tokenizer;

use crate::build::{File, f32, flag, list, text, u32};
use crate::{fixture, open};

#[derive(Deserialize)]
struct Verdict {
    text: String,
    ids: Vec<u32>,
    special: Vec<u32>,
    decoded: String,
}

pub(crate) fn load(file: &GgufFile) -> Tokenizer {
    serde_json::from_value(file.tokenizer().unwrap()).unwrap()
}

pub(crate) fn ids(tokenizer: &Tokenizer, text: &str, special: bool) -> Vec<u32> {
    tokenizer.encode(text, special).unwrap().get_ids().to_vec()
}

fn agrees(name: &str) {
    let file = GgufFile::open(&fixture(&format!("{name}.gguf"))).unwrap();
    let tokenizer = load(&file);
    let verdicts = std::fs::read_to_string(fixture(&format!("{name}.json"))).unwrap();
    let verdicts: Vec<Verdict> = serde_json::from_str(&verdicts).unwrap();
    assert!(verdicts.len() > 10);
    for Verdict { text, ids: expected, special, decoded } in verdicts {
        assert_eq!(ids(&tokenizer, &text, false), expected, "{name}: {text:?}");
        assert_eq!(ids(&tokenizer, &text, true), special, "{name}: {text:?}");
        assert_eq!(tokenizer.decode(&expected, true).unwrap(), decoded, "{name}: {text:?}");
    }
}

#[test]
fn byte_level_tokenizers_agree() {
    for name in ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"] {
        agrees(&format!("bpe-{name}"));
    }
}

#[test]
fn sentencepiece_agrees() {
    agrees("spm");
}

#[test]
fn control_tokens_of_sentencepiece_are_found_in_texts() {
    let tokenizer = load(&GgufFile::open(&fixture("spm.gguf")).unwrap());
    let found = ids(&tokenizer, "<s>the</s>", false);
    assert_eq!((found[0], found[found.len() - 1]), (1, 2));
    assert_eq!(found[1..found.len() - 1], ids(&tokenizer, "the", false));
}

/// A SentencePiece tokenizer of four tokens.
fn sentencepiece() -> File {
    File::small()
        .set("tokenizer.ggml.model", text("llama"))
        .set("tokenizer.ggml.scores", list(&[0.0, -1.0, -2.0, -3.0].map(f32)))
}

fn error(file: File) -> GgufError {
    open(&file.bytes()).unwrap().tokenizer().unwrap_err()
}

#[test]
fn tokens_around_a_text() {
    let with = |file: File, key: &str, value: bool| {
        load(&open(&file.set(key, flag(value)).bytes()).unwrap())
    };
    let begin = "tokenizer.ggml.add_bos_token";
    assert_eq!(ids(&with(File::small(), begin, true), "ab", true), [3, 2]);
    assert_eq!(ids(&with(File::small(), begin, false), "ab", true), [2]);
    let end = with(File::small(), "tokenizer.ggml.add_eos_token", true);
    assert_eq!(ids(&end, "ab", true), [2, 3]);
    let pair = end.encode(("a", "b"), true).unwrap();
    assert_eq!(pair.get_ids(), [0, 3, 1, 3]);
    let llama = File::small().set("tokenizer.ggml.pre", text("llama-bpe"));
    assert_eq!(ids(&load(&open(&llama.bytes()).unwrap()), "ab", true), [3, 2]);
    let no_prefix = with(sentencepiece(), "tokenizer.ggml.add_space_prefix", false);
    assert_eq!(ids(&no_prefix, "ab", true), [3, 2]);
    let lacking = File::small().without("tokenizer.ggml.bos_token_id").set(begin, flag(true));
    assert!(matches!(error(lacking), GgufError::MissingKey { .. }));
}

#[test]
fn tokenizers_that_cannot_be_are_refused() {
    let tokens = |tokens: [&str; 4]| list(&tokens.map(text));
    let twice = error(File::small().set("tokenizer.ggml.tokens", tokens(["a", "b", "ab", "a"])));
    let expected = matches!(twice, GgufError::DuplicateToken { first: 0, second: 3, .. });
    assert!(expected, "{twice}");
    for merge in ["ab", "a c", "b a", " ab", "a  b", "", " "] {
        let file = File::small().set("tokenizer.ggml.merges", list(&[text("a b"), text(merge)]));
        let error = error(file);
        assert!(matches!(error, GgufError::Merge { index: 1, .. }), "{merge:?}: {error}");
    }
    let long = "x".repeat(600);
    for (key, value) in [
        ("tokenizer.ggml.model", text("bert")),
        ("tokenizer.ggml.pre", text("default")),
        ("tokenizer.ggml.token_type", list(&[1, 1, 1, 9].map(u32))),
    ] {
        let error = error(File::small().set(key, value));
        assert!(matches!(&error, GgufError::Value { key: k, .. } if k == key), "{error}");
    }
    for (key, value) in [
        ("tokenizer.ggml.scores", list(&[0.0, 1.0, f32::NAN, 2.0].map(f32))),
        ("tokenizer.ggml.tokens", tokens(["a", "b", &long, "c"])),
        ("tokenizer.ggml.unknown_token_id", u32(4)),
        ("tokenizer.ggml.remove_extra_whitespaces", flag(true)),
    ] {
        let error = error(sentencepiece().set(key, value));
        assert!(matches!(&error, GgufError::Value { key: k, .. } if k == key), "{error}");
    }
    for (file, key) in
        [(File::small(), "tokenizer.ggml.token_type"), (sentencepiece(), "tokenizer.ggml.scores")]
    {
        let short = error(file.clone().set(key, list(&[1, 1].map(u32))));
        assert!(matches!(short, GgufError::VocabSize { rows: 4, actual: 2, .. }), "{short}");
        let absent = error(file.without(key));
        assert!(matches!(&absent, GgufError::MissingKey { key: k } if k == key), "{absent}");
    }
    for key in ["model", "pre", "tokens", "merges"].map(|key| format!("tokenizer.ggml.{key}")) {
        let absent = error(File::small().without(&key));
        assert!(matches!(&absent, GgufError::MissingKey { key: k } if *k == key), "{absent}");
    }
}
