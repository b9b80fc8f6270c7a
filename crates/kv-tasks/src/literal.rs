//! Values in texts: JSON, or Python's literals, in which some data sets keep lists.

use py_literal::Value as Literal;
use serde_json::{Map, Value};

/// The value that a text says, or nothing if it says none.
pub(crate) fn parse(text: &str) -> Option<Value> {
    match serde_json::from_str(text) {
        Ok(value) => Some(value),
        Err(_) => text.trim().parse().ok().map(json),
    }
}

fn json(literal: Literal) -> Value {
    let list = |values: Vec<Literal>| Value::Array(values.into_iter().map(json).collect());
    match literal {
        Literal::String(text) => Value::String(text),
        Literal::Bytes(bytes) => Value::String(String::from_utf8_lossy(&bytes).into_owned()),
        Literal::Integer(number) => match i64::try_from(&number) {
            Ok(number) => number.into(),
            Err(_) => Value::String(number.to_string()),
        },
        Literal::Float(number) => number.into(),
        Literal::Complex(number) => Value::String(number.to_string()),
        Literal::Tuple(values) | Literal::List(values) | Literal::Set(values) => list(values),
        Literal::Dict(entries) => {
            let key = |key| match json(key) {
                Value::String(text) => text,
                other => other.to_string(),
            };
            let entries = entries.into_iter().map(|(name, value)| (key(name), json(value)));
            Value::Object(entries.collect::<Map<_, _>>())
        }
        Literal::Boolean(value) => value.into(),
        Literal::None => Value::Null,
    }
}
