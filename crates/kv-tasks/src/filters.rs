//! Filters of templates and expressions, beside those of the template engine.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use crate::literal as literals;

/// The contents of the last `\boxed{}`, or the text itself if it has none.
pub(crate) fn boxed(text: &str) -> String {
    kv_graders::last_boxed(text).map_or_else(|| text.to_owned(), |contents| contents.to_string())
}

/// The values of a key, in a list of objects that have it, or in an object of lists. Data sets
/// store the same thing in either form.
pub(crate) fn column(value: &Value, key: &str) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Map => value.get_attr(key),
        _ => value.try_iter()?.map(|item| item.get_attr(key)).collect(),
    }
}

/// Trimmed texts with a full stop at the end of each, as lm-evaluation-harness has the answers of
/// TruthfulQA. Empty ones are dropped.
pub(crate) fn full_stops(texts: Vec<String>) -> Vec<String> {
    let trimmed = texts.iter().map(|text| text.trim()).filter(|text| !text.is_empty());
    trimmed.map(|text| format!("{}.", text.strip_suffix('.').unwrap_or(text))).collect()
}

/// The letter of an answer among the choices. The answer is a text or a list with it, and a letter
/// is itself.
pub(crate) fn letter_of(answer: &Value, choices: Vec<String>) -> Result<String, Error> {
    let answers: Vec<Value> = match answer.kind() {
        ValueKind::Seq => answer.try_iter()?.collect(),
        _ => vec![answer.clone()],
    };
    let answers: Vec<&str> = answers.iter().filter_map(Value::as_str).collect();
    let place = choices.iter().position(|choice| answers.contains(&choice.as_str()));
    let letter = place.and_then(|place| u8::try_from(place).ok()).map(|place| b'A' + place);
    let given = answers.iter().find(|answer| matches!(answer.as_bytes(), [b'A'..=b'Z']));
    match (letter, given) {
        (Some(letter), _) => Ok(char::from(letter).to_string()),
        (None, Some(given)) => Ok((*given).to_owned()),
        (None, None) => {
            let message = format!("{answer} is none of the choices {choices:?}");
            Err(Error::new(ErrorKind::InvalidOperation, message))
        }
    }
}

/// The value that a text says in JSON or as a Python literal; any other value is itself.
pub(crate) fn literal(value: Value) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return Ok(value);
    };
    let parsed = literals::parse(text).map(Value::from_serialize);
    parsed.ok_or_else(|| {
        Error::new(ErrorKind::InvalidOperation, "the text is neither JSON nor a Python literal")
    })
}
