use super::Tokenizer;
use crate::error::ModelError;

const JSON: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/needle-1m/tokenizer.json"));

fn tokenizer() -> Tokenizer {
    Tokenizer::from_bytes(JSON).unwrap()
}

const TEXT: &str = "The secret number of the brave élan is 40713.\n漢字 🦀🦀 ok — naïve\u{fffd}!";

#[test]
fn text_survives_the_round_trip() {
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.vocab_size(), 1024);
    let ids = tokenizer.encode(TEXT, true).unwrap();
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), TEXT);
    // Digits are single tokens.
    assert_eq!(tokenizer.encode("40713", false).unwrap().len(), 5);
    assert!(tokenizer.encode("", true).unwrap().is_empty());
}

#[test]
fn special_tokens_can_be_left_out() {
    let tokenizer = tokenizer();
    let end = tokenizer.token_id("<|endoftext|>").unwrap();
    let ids = tokenizer.encode("a<|endoftext|>b", false).unwrap();
    assert!(ids.contains(&end));
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "ab");
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), "a<|endoftext|>b");
    let mut stream = tokenizer.stream(true);
    let text: String = ids.iter().filter_map(|id| stream.push(*id).unwrap()).collect();
    assert_eq!(text, "ab");
}

#[test]
fn pieces_are_whole_characters_and_join_to_the_text() {
    let tokenizer = tokenizer();
    let ids = tokenizer.encode(TEXT, false).unwrap();
    let mut stream = tokenizer.stream(false);
    let pieces: Vec<_> = ids.iter().filter_map(|id| stream.push(*id).unwrap()).collect();
    assert_eq!(stream.finish().unwrap(), None);
    assert_eq!(pieces.concat(), TEXT);
    assert!(pieces.iter().all(|piece| !piece.is_empty()));
    // The crab takes several byte tokens, and comes as one piece.
    assert!(pieces.iter().any(|piece| piece.trim() == "🦀"), "{pieces:?}");
    assert_eq!(pieces.concat().matches(char::REPLACEMENT_CHARACTER).count(), 1);
}

#[test]
fn an_unfinished_character_comes_out_at_the_end() {
    let tokenizer = tokenizer();
    let crab = tokenizer.encode("🦀", false).unwrap();
    assert!(crab.len() > 1);
    let mut stream = tokenizer.stream(false);
    for id in &crab[..crab.len() - 1] {
        assert_eq!(stream.push(*id).unwrap(), None);
    }
    let rest = stream.finish().unwrap().unwrap();
    assert!(rest.ends_with(char::REPLACEMENT_CHARACTER));
    // Nothing of it is left for the next text.
    let id = tokenizer.encode("a", false).unwrap()[0];
    assert_eq!(stream.push(id).unwrap().as_deref(), Some("a"));
    assert_eq!(stream.finish().unwrap(), None);
}

#[test]
fn any_tokens_join_to_their_text() {
    let tokenizer = tokenizer();
    let mut state = 7u32;
    for _ in 0..50 {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % 1100
        };
        let ids: Vec<u32> = (0..60).map(|_| next()).collect();
        let mut stream = tokenizer.stream(true);
        let mut text: String = ids.iter().filter_map(|id| stream.push(*id).unwrap()).collect();
        text.extend(stream.finish().unwrap());
        assert_eq!(text, tokenizer.decode(&ids, true).unwrap());
    }
}

/// A tokenizer in the form of Llama 2's and Mistral's: pieces of text with `▁` for spaces, and a
/// token for each byte.
fn byte_fallback() -> Tokenizer {
    let mut vocabulary = serde_json::Map::new();
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let pieces = ["<unk>", "▁", "a", "▁b", "1"].map(String::from);
    for (id, token) in pieces.into_iter().chain(bytes).enumerate() {
        vocabulary.insert(token, id.into());
    }
    let json = serde_json::json!({
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>",
            "byte_fallback": true, "fuse_unk": true},
    });
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

/// Token of a byte of [`byte_fallback`].
fn byte(value: u8) -> u32 {
    5 + u32::from(value)
}

#[test]
fn characters_of_byte_tokens_are_whole() {
    let tokenizer = byte_fallback();
    let ids = tokenizer.encode("a漢🦀 b\n1", false).unwrap();
    let mut stream = tokenizer.stream(true);
    let mut pieces: Vec<_> = ids.iter().filter_map(|id| stream.push(*id).unwrap()).collect();
    pieces.extend(stream.finish().unwrap());
    assert_eq!(pieces.concat(), "a漢🦀 b\n1");
    assert!(pieces.iter().all(|piece| !piece.contains(char::REPLACEMENT_CHARACTER)));
}

#[test]
fn cut_characters_and_invalid_bytes_of_byte_tokens_are_replaced() {
    let tokenizer = byte_fallback();
    let crab = "🦀".as_bytes();
    let (a, one) = (2, 4);
    for ids in [
        // A character cut by the last token, and by text.
        vec![a, byte(crab[0]), byte(crab[1])],
        vec![a, byte(crab[0]), byte(crab[1]), one],
        // A byte that starts no character, alone and behind bytes that are characters.
        vec![byte(0xff), a],
        vec![a, byte(b'\n'), byte(0xff), one],
        vec![byte(crab[0]), byte(crab[1]), byte(crab[2]), byte(crab[3]), byte(0x80), a],
    ] {
        let mut stream = tokenizer.stream(true);
        let mut text: String = ids.iter().filter_map(|id| stream.push(*id).unwrap()).collect();
        text.extend(stream.finish().unwrap());
        assert_eq!(text, tokenizer.decode(&ids, true).unwrap(), "{ids:?}");
        assert!(text.contains(char::REPLACEMENT_CHARACTER));
    }
}

#[test]
fn any_byte_tokens_join_to_their_text() {
    let tokenizer = byte_fallback();
    let mut state = 3u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % 261
    };
    for _ in 0..50 {
        let ids: Vec<u32> = (0..60).map(|_| next()).collect();
        let mut stream = tokenizer.stream(true);
        let mut text: String = ids.iter().filter_map(|id| stream.push(*id).unwrap()).collect();
        text.extend(stream.finish().unwrap());
        assert_eq!(text, tokenizer.decode(&ids, true).unwrap());
    }
}

/// A decoder that rewrites text across tokens: what was returned stays, nothing fails.
#[test]
fn text_that_is_rewritten_is_no_error() {
    let mut json: serde_json::Value = serde_json::from_slice(JSON).unwrap();
    json["decoder"] = serde_json::json!({"type": "Sequence", "decoders": [
        {"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "40"}, "content": "x"},
    ]});
    let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    let ids = tokenizer.encode("407", false).unwrap();
    let mut stream = tokenizer.stream(true);
    let text: String = ids.iter().filter_map(|id| stream.push(*id).unwrap()).collect();
    assert_eq!(text, "4x7");
}

#[test]
fn limits_of_the_file_are_lifted() {
    let mut json: serde_json::Value = serde_json::from_slice(JSON).unwrap();
    json["truncation"] = serde_json::json!(
        {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    );
    let limited = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    assert_eq!(limited.encode(TEXT, true).unwrap(), tokenizer().encode(TEXT, true).unwrap());
}

#[test]
fn a_bad_file_is_a_typed_error() {
    assert!(matches!(Tokenizer::from_bytes(b"{}"), Err(ModelError::Tokenizer { .. })));
    assert!(matches!(Tokenizer::from_file("/no/such/file"), Err(ModelError::Io { .. })));
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = Tokenizer::from_file(file.path()).unwrap_err().to_string();
    assert!(text.contains(&file.path().display().to_string()), "{text}");
}
