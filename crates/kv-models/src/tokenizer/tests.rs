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
