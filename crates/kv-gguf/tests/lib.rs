//! Tests of the crate, in one binary to keep the time of linking low.

#![allow(clippy::unwrap_used)]

mod agreement;
mod allocation;
mod build;
mod config;
mod flips;
mod hostile;
mod real;
mod tokenizer;

use std::io::Write;
use std::path::{Path, PathBuf};

use kv_gguf::{GgufError, GgufFile};
use tempfile::NamedTempFile;

/// A file of the folder `fixtures`.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// Opens a file of these bytes.
fn open(bytes: &[u8]) -> Result<GgufFile, GgufError> {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    GgufFile::open(file.path())
}

/// Reads everything that a file has.
fn read_all(file: &GgufFile) -> Result<(), GgufError> {
    file.tensors().try_for_each(|tensor| {
        let numbers = file.read(&tensor.name)?;
        assert_eq!(numbers.len(), tensor.shape.iter().product::<usize>());
        Ok(())
    })?;
    file.chat_template();
    file.config()?;
    file.tokenizer().map(drop)
}
