use super::TextOutput;
use crate::Tokenizer;

fn tokenizer() -> Tokenizer {
    let json =
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/needle-1m/tokenizer.json"));
    Tokenizer::from_bytes(json).unwrap()
}

/// Pieces shown for each of the text's tokens, the rest shown at the end, and the text.
fn run(text: &str, stop: &[&str]) -> (Vec<String>, String, String) {
    let tokenizer = tokenizer();
    let stop = stop.iter().map(ToString::to_string).collect();
    let mut output = TextOutput::new(tokenizer.stream(true), stop);
    let ids = tokenizer.encode(text, false).unwrap();
    let pieces = ids.iter().map(|id| output.push(*id).unwrap()).collect();
    let rest = output.finish().unwrap();
    (pieces, rest, output.text().to_string())
}

#[test]
fn the_beginning_of_a_stop_string_is_not_shown() {
    // Digits are single tokens.
    let (pieces, rest, text) = run("21963", &["196"]);
    assert_eq!(pieces, ["2", "", "", "", ""]);
    assert_eq!((rest.as_str(), text.as_str()), ("", "2"));
    // The first of several counts, wherever the others begin.
    let (pieces, rest, text) = run("21963", &["63", "963", "3"]);
    assert_eq!((pieces.concat() + &rest, text.as_str()), ("21".into(), "21"));
    // Empty strings stop nothing.
    assert_eq!(run("219", &[""]).2, "219");
}

#[test]
fn what_did_not_become_a_stop_string_is_shown() {
    let (pieces, rest, text) = run("21953", &["196"]);
    assert_eq!(pieces, ["2", "", "", "195", "3"]);
    assert_eq!((rest.as_str(), text.as_str()), ("", "21953"));
    // A beginning within a beginning.
    let (pieces, ..) = run("1121", &["112x"]);
    assert_eq!(pieces, ["", "", "", "112"]);
    // No further token completes it.
    let (pieces, rest, text) = run("219", &["196"]);
    assert_eq!(pieces, ["2", "", ""]);
    assert_eq!((rest.as_str(), text.as_str()), ("19", "219"));
}

#[test]
fn half_a_character_is_not_shown() {
    let tokenizer = tokenizer();
    let crab = tokenizer.encode("1🦀", false).unwrap();
    for count in 2..crab.len() {
        let mut output = TextOutput::new(tokenizer.stream(true), vec!["19".into()]);
        let mut shown: String = crab[..count].iter().map(|id| output.push(*id).unwrap()).collect();
        shown += &output.finish().unwrap();
        assert_eq!(shown, "1");
        // The text is as the tokenizer decodes these tokens.
        assert_eq!(output.text(), tokenizer.decode(&crab[..count], true).unwrap());
    }
    assert_eq!(run("1🦀", &["19"]).0.concat(), "1🦀");
    // A stop string that ends within other characters.
    assert_eq!(run("a🦀b", &["🦀"]).2, "a");
}

#[test]
fn tokens_are_whole_once_nothing_of_them_is_held_back() {
    let tokenizer = tokenizer();
    let mut output = TextOutput::new(tokenizer.stream(true), vec!["196".into()]);
    let mut told = |text: &str| {
        let ids = tokenizer.encode(text, false).unwrap();
        let each = ids.into_iter().map(|id| {
            output.push(id).unwrap();
            (output.end_of_last().unwrap(), output.shown())
        });
        each.collect::<Vec<_>>()
    };
    assert_eq!(told("219"), [(Some(1), 1), (Some(2), 1), (Some(3), 1)]);
    assert_eq!(told("5"), [(Some(4), 4)]);
    // The bytes of one character: the last one completes it.
    let crab = told("🦀");
    assert!(crab.len() > 1, "{crab:?}");
    let (last, others) = crab.split_last().unwrap();
    assert!(others.iter().all(|own| *own == (Some(5), 4)), "{crab:?}");
    assert_eq!(*last, (Some(8), 8));
    assert_eq!(told("196"), [(Some(9), 8), (Some(10), 8), (None, 8)]);
}

/// A line break is a byte token in the vocabularies of Llama 2 and Mistral.
#[test]
fn a_stop_string_of_byte_tokens_ends_at_once() {
    let json = serde_json::json!({
        "version": "1.0",
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": {"a": 0, "<0x0A>": 1}, "merges": [],
            "byte_fallback": true},
    });
    let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    let mut output = TextOutput::new(tokenizer.stream(true), vec!["\n".into()]);
    assert_eq!(output.push(0).unwrap(), "a");
    assert_eq!(output.push(1).unwrap(), "");
    assert!(output.is_stopped());
    assert_eq!(output.text(), "a");
}
