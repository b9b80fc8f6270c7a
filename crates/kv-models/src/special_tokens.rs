//! The special tokens that a model's files name.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{ModelError, Result};

/// Tokens by their roles (`bos_token`, `eos_token`, ...).
#[derive(Debug)]
pub(crate) struct SpecialTokens(BTreeMap<String, String>);

impl SpecialTokens {
    /// The special tokens of `tokenizer_config.json` and, where it does not name them, of
    /// `special_tokens_map.json`; both files may be absent.
    ///
    /// # Errors
    /// [`ModelError::Io`], [`ModelError::InvalidJson`].
    pub(crate) fn from_folder(folder: &Path) -> Result<Self> {
        let map = read_object(&folder.join("special_tokens_map.json"))?;
        let config = read_object(&folder.join("tokenizer_config.json"))?;
        let token = |(role, value): (&String, &Value)| {
            role.ends_with("_token").then(|| Some((role.clone(), spelling(value)?)))?
        };
        Ok(Self(map.iter().chain(&config).filter_map(token).collect()))
    }

    /// The token of a role.
    pub(crate) fn get(&self, role: &str) -> Option<&str> {
        self.0.get(role).map(String::as_str)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(role, token)| (role.as_str(), token.as_str()))
    }
}

/// A string, or an object with its `content`.
fn spelling(token: &Value) -> Option<String> {
    Some(token.as_str().or_else(|| token.get("content")?.as_str())?.to_string())
}

/// A file's text, if it is there.
pub(crate) fn read_if_there(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ModelError::io(path, source)),
    }
}

/// A file's JSON object; an empty one if there is no such file.
pub(crate) fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let Some(text) = read_if_there(path)? else { return Ok(Map::new()) };
    serde_json::from_str(&text).map_err(|error| ModelError::InvalidJson {
        file: path.display().to_string(),
        reason: error.to_string(),
    })
}
