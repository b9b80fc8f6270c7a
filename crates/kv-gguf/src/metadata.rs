//! The keys and values of a file.

use std::io::{ErrorKind, Read};
use std::path::Path;

use gguf_rs_lib::GGUFError;
use gguf_rs_lib::format::{Metadata as Entries, MetadataValue as Value};

use crate::GgufError;

/// The largest size that a model's dimension can have.
const MAX_SIZE: u64 = i32::MAX as u64;

/// The keys and values of a file, read with a bound on memory.
pub(crate) struct Metadata(Entries);

impl Metadata {
    /// Reads `count` entries of a file of `length` bytes.
    pub(crate) fn read(
        reader: &mut impl Read,
        count: u64,
        path: &Path,
        length: u64,
    ) -> Result<Self, GgufError> {
        Entries::read_from(reader, count).map(Self).map_err(|error| match error {
            GGUFError::UnexpectedEof => GgufError::Truncated { part: "metadata", length },
            GGUFError::Io(source) if source.kind() == ErrorKind::UnexpectedEof => {
                GgufError::Truncated { part: "metadata", length }
            }
            GGUFError::Io(source) => GgufError::io(path, source),
            error => GgufError::Metadata { reason: error.to_string() },
        })
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.0.get(key).is_some()
    }

    /// A whole number from 1 to 2^31 - 1.
    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, GgufError> {
        let Some(number) = self.unsigned(key)? else { return Ok(None) };
        if !(1..=MAX_SIZE).contains(&number) {
            let expected = format!("a size from 1 to {MAX_SIZE}");
            return Err(GgufError::Value { key: key.into(), expected, actual: number.to_string() });
        }
        Ok(Some(number as usize))
    }

    pub(crate) fn required_size(&self, key: &str) -> Result<usize, GgufError> {
        self.size(key)?.ok_or_else(|| missing(key))
    }

    /// A whole number of at least 0.
    pub(crate) fn unsigned(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.get(key, "a whole number of at least 0", whole)
    }

    /// The id of one of `tokens` tokens.
    pub(crate) fn token(&self, key: &str, tokens: usize) -> Result<Option<usize>, GgufError> {
        let Some(id) = self.unsigned(key)? else { return Ok(None) };
        if id >= tokens as u64 {
            let expected = format!("an id below {tokens}");
            return Err(GgufError::Value { key: key.into(), expected, actual: id.to_string() });
        }
        Ok(Some(id as usize))
    }

    /// A finite number above 0.
    pub(crate) fn positive(&self, key: &str) -> Result<Option<f64>, GgufError> {
        let Some(number) = self.get(key, "a number", number)? else { return Ok(None) };
        if !(number.is_finite() && number > 0.0) {
            let (key, expected) = (key.into(), "a finite number above 0".into());
            return Err(GgufError::Value { key, expected, actual: number.to_string() });
        }
        Ok(Some(number))
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool, GgufError> {
        Ok(self.get(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.get(key, "text", Value::as_str)
    }

    pub(crate) fn required_text(&self, key: &str) -> Result<&str, GgufError> {
        self.text(key)?.ok_or_else(|| missing(key))
    }

    /// The length of a list of any type.
    pub(crate) fn list_len(&self, key: &str) -> Result<Option<usize>, GgufError> {
        Ok(self.list(key, "a list", Some)?.map(|list| list.len()))
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Vec<&str>, GgufError> {
        self.list(key, "a list of texts", Value::as_str)?.ok_or_else(|| missing(key))
    }

    pub(crate) fn whole_numbers(&self, key: &str) -> Result<Vec<u64>, GgufError> {
        let expected = "a list of whole numbers of at least 0";
        self.list(key, expected, whole)?.ok_or_else(|| missing(key))
    }

    pub(crate) fn numbers(&self, key: &str) -> Result<Vec<f64>, GgufError> {
        self.list(key, "a list of numbers", number)?.ok_or_else(|| missing(key))
    }

    fn get<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong(key, expected, value))
    }

    fn list<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, GgufError> {
        let list = self.get(key, expected, |value| match value {
            Value::Array(list) => Some(list.values.as_slice()),
            _ => None,
        })?;
        let Some(list) = list else { return Ok(None) };
        let items = list.iter().map(|item| read(item).ok_or_else(|| wrong(key, expected, item)));
        items.collect::<Result<_, _>>().map(Some)
    }
}

pub(crate) fn missing(key: &str) -> GgufError {
    GgufError::MissingKey { key: key.to_owned() }
}

/// A value with the type that is wrong; of long values the type alone.
fn wrong(key: &str, expected: &'static str, value: &Value) -> GgufError {
    let kind = value.value_type();
    let actual = match value {
        Value::String(_) | Value::Array(_) => kind.to_string(),
        value => format!("{} ({kind})", value.to_string_representation()),
    };
    GgufError::WrongType { key: key.to_owned(), expected, actual }
}

fn whole(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_i64().and_then(|number| number.try_into().ok()))
}

fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| whole(value).map(|number| number as f64))
}
