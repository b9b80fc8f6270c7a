//! Files of what was measured of a model: beside the model's own files, as JSON.

use std::path::{Path, PathBuf};

use crate::error::{FisherError, ModelError, Result};

/// The path of `file` in a model's local folder.
///
/// # Errors
/// [`FisherError::NoFolder`] for models without a local folder.
pub(crate) fn beside(model: &str, file: &'static str) -> Result<PathBuf> {
    let folder = Path::new(model);
    match folder.is_dir() {
        true => Ok(folder.join(file)),
        false => Err(FisherError::NoFolder { model: model.into(), file }.into()),
    }
}

/// Writes JSON and a line's end.
///
/// # Errors
/// [`ModelError::Io`], also for what JSON cannot say.
pub(crate) fn write(path: &Path, json: serde_json::Result<String>) -> Result<()> {
    let write = || std::fs::write(path, json? + "\n");
    write().map_err(|source| ModelError::io(path, source))
}
