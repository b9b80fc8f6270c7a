//! Texts to tokens, and how many tokens a text has at least.

use kv_models::Tokenizer;
use serde_json::Value;

/// Bytes of a text for each byte of its composed form (NFC), at most.
const COMPOSED: usize = 3;

/// The most bytes of a text that one of a tokenizer's tokens covers: a text of so many bytes for
/// each position of a model does not fit, which is known before its tokens are. `None` where a
/// token may cover any number of bytes, and for tokenizers of which nothing is known.
pub(crate) fn longest_token(tokenizer: &Tokenizer) -> Option<usize> {
    longest(&serde_json::from_str(&tokenizer.to_json().ok()?).ok()?)
}

fn longest(tokenizer: &Value) -> Option<usize> {
    let model = &tokenizer["model"];
    let normalizers = parts(&tokenizer["normalizer"], "normalizers");
    let splitters = parts(&tokenizer["pre_tokenizer"], "pretokenizers");
    let added = tokenizer["added_tokens"].as_array()?;
    let vocabulary = model["vocab"].as_object()?;
    let is = |part: &Value, name: &str| part["type"] == name;
    // Parts that drop some of the text, and added tokens that take spaces around them, would let
    // few tokens cover a long text.
    let keeps = |part: &&Value| match part["type"].as_str() {
        Some("NFC" | "Prepend" | "ByteLevel" | "Digits" | "Metaspace") => true,
        Some("Replace") => {
            let (from, to) = (part["pattern"]["String"].as_str(), part["content"].as_str());
            from.zip(to).is_some_and(|(from, to)| from.len() <= to.len())
        }
        Some("Split" | "Punctuation") => part["behavior"] != "Removed",
        _ => false,
    };
    let takes_spaces = |token: &Value| token["lstrip"] == true || token["rstrip"] == true;
    // Without a token for each byte, unknown characters are dropped or become one token together.
    let bytes = splitters.iter().any(|part| is(part, "ByteLevel"));
    let letters = match bytes {
        true => vocabulary.keys().filter(|token| token.chars().count() == 1).count(),
        false => vocabulary.keys().filter(|token| is_byte(token)).count(),
    };
    let whole = letters >= 256 && (bytes || model["byte_fallback"] == true);
    let kept = normalizers.iter().chain(&splitters).all(keeps);
    if model["type"] != "BPE" || !kept || !whole || added.iter().any(takes_spaces) {
        return None;
    }
    // A letter stands for a byte there.
    let length = |token: &String| if bytes { token.chars().count() } else { token.len() };
    let own = vocabulary.keys().map(length).max()?;
    let others = added.iter().filter_map(|token| token["content"].as_str()).map(str::len);
    let composes = normalizers.iter().any(|part| is(part, "NFC"));
    Some(others.fold(own, usize::max) * if composes { COMPOSED } else { 1 })
}

/// The parts of a sequence, a part that is none, or nothing.
fn parts<'a>(part: &'a Value, sequence: &str) -> Vec<&'a Value> {
    match part {
        Value::Null => Vec::new(),
        part if part["type"] == "Sequence" => {
            let inner = part[sequence].as_array().into_iter().flatten();
            inner.flat_map(|part| parts(part, sequence)).collect()
        }
        part => vec![part],
    }
}

/// Whether a token stands for one byte, as `<0xE6>` does.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A byte-level tokenizer whose longest token has five bytes.
    fn byte_level() -> Value {
        let letters = (0..256).map(|i| char::from_u32(0x100 + i).unwrap().to_string());
        let vocabulary = letters.chain(["Ġthe".into(), "Ġcalm".into()]).zip(0..);
        let vocabulary: serde_json::Map<String, Value> =
            vocabulary.map(|(token, id)| (token, json!(id))).collect();
        json!({
            "added_tokens": [{"content": "<e>", "lstrip": false, "rstrip": false}],
            "normalizer": null,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "behavior": "Isolated"}, {"type": "ByteLevel"}]},
            "model": {"type": "BPE", "vocab": vocabulary},
        })
    }

    #[test]
    fn the_longest_token_is_found() {
        assert_eq!(longest(&byte_level()), Some(5));
        let mut added = byte_level();
        added["added_tokens"][0]["content"] = json!("<|end of text|>");
        assert_eq!(longest(&added), Some(15));
        let mut composed = byte_level();
        composed["normalizer"] = json!({"type": "NFC"});
        assert_eq!(longest(&composed), Some(15));
        let bytes = (0..256).map(|byte| (format!("<0x{byte:02X}>"), json!(byte)));
        let vocabulary: serde_json::Map<String, Value> =
            bytes.chain([("▁the".to_string(), json!(256))]).collect();
        let fallback = json!({
            "added_tokens": [],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "pre_tokenizer": null,
            "model": {"type": "BPE", "byte_fallback": true, "vocab": vocabulary},
        });
        assert_eq!(longest(&fallback), Some(6));
    }

    #[test]
    fn tokens_that_may_cover_anything_have_no_longest() {
        for (path, value) in [
            ("/model/type", json!("Unigram")),
            ("/normalizer", json!({"type": "NFKC"})),
            ("/normalizer", json!({"type": "Strip"})),
            ("/pre_tokenizer", json!({"type": "Whitespace"})),
            ("/pre_tokenizer/pretokenizers/0/behavior", json!("Removed")),
            ("/added_tokens/0/lstrip", json!(true)),
            ("/model/vocab", json!({"a": 0})),
        ] {
            let mut tokenizer = byte_level();
            *tokenizer.pointer_mut(path).unwrap() = value;
            assert_eq!(longest(&tokenizer), None, "{path}");
        }
        let model = kv_models::Model::load(
            "needle-1m",
            &kv_core::select_device("cpu".parse().unwrap()).unwrap(),
            None,
        );
        // The longest token of the embedded model ends its texts.
        let longest = longest_token(model.unwrap().tokenizer().unwrap());
        assert_eq!(longest, Some("<|endoftext|>".len()));
    }
}
