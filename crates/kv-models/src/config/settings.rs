//! Typed look-ups in a JSON object, whose errors name the key.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::{ModelError, Result};

/// Sizes beyond this are taken for mistakes (and would overflow products).
pub(super) const MAX_SIZE: usize = 1 << 24;

/// A JSON object of settings.
pub(super) struct Settings {
    map: Map<String, Value>,
    /// Put before a key in messages, for nested objects.
    prefix: &'static str,
}

impl Settings {
    pub(super) fn parse(file: &str, json: &str) -> Result<Self> {
        let invalid = |reason: String| ModelError::InvalidJson { file: file.into(), reason };
        let map = serde_json::from_str(json).map_err(|error| invalid(error.to_string()))?;
        Ok(Self { map, prefix: "" })
    }

    pub(super) fn nested(map: Map<String, Value>, prefix: &'static str) -> Self {
        Self { map, prefix }
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.map.keys().map(String::as_str)
    }

    /// Whether the key is there, `null` included.
    pub(super) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The value, unless it is absent or `null`.
    pub(super) fn value(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// The value read as `T`, unless it is absent or `null`; `expected` describes `T` in words.
    pub(super) fn get<T: DeserializeOwned>(&self, key: &str, expected: &str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        match serde_json::from_value(value.clone()) {
            Ok(value) => Ok(Some(value)),
            Err(_) => Err(self.unsupported(key, expected)),
        }
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.get(key, "true or false")?.unwrap_or(default))
    }

    /// A size from 1 to [`MAX_SIZE`], if given.
    pub(super) fn size(&self, key: &str) -> Result<Option<usize>> {
        let expected = format!("a whole number from 1 to {MAX_SIZE}");
        match self.get(key, &expected)? {
            Some(n) if !(1..=MAX_SIZE).contains(&n) => Err(self.unsupported(key, expected)),
            size => Ok(size),
        }
    }

    /// A size that has no default.
    pub(super) fn required_size(&self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// A finite number above zero, if given.
    pub(super) fn positive(&self, key: &str) -> Result<Option<f64>> {
        let expected = "a finite number above 0";
        match self.get(key, expected)? {
            Some(x) if !(f64::is_finite(x) && x > 0.0) => Err(self.unsupported(key, expected)),
            number => Ok(number),
        }
    }

    pub(super) fn required_positive(&self, key: &str) -> Result<f64> {
        self.positive(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn missing(&self, key: &str) -> ModelError {
        ModelError::MissingSetting { setting: format!("{}{key}", self.prefix) }
    }

    /// The error that refuses the key's present value.
    pub(super) fn unsupported(&self, key: &str, supported: impl Into<String>) -> ModelError {
        let value = match self.map.get(key) {
            None => "absent".to_string(),
            Some(Value::String(text)) => format!("\"{text}\""),
            Some(Value::Object(map)) => {
                let keys: Vec<_> = map.keys().map(String::as_str).collect();
                format!("an object with the keys {}", keys.join(", "))
            }
            Some(value) => value.to_string(),
        };
        ModelError::UnsupportedSetting {
            setting: format!("{}{key}", self.prefix),
            value,
            supported: supported.into(),
        }
    }
}
