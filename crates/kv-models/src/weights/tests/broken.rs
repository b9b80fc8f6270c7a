//! Files that are not what they should be.

use std::fs;

use burn::tensor::{DType, Device};
use safetensors::tensor::Dtype;
use tempfile::tempdir;

use super::{file, open};
use crate::error::{ModelError, WeightsError};
use crate::weights::Weights;

#[test]
fn broken_files_are_typed_errors() {
    let folder = tempdir().unwrap();
    let bytes = file(&[("a", Dtype::F32)]);
    for length in 0..bytes.len() {
        let error = open(folder.path(), "model.safetensors", &bytes[..length]).unwrap_err();
        assert!(
            matches!(error, ModelError::Weights(WeightsError::Truncated { .. })),
            "{length}: {error}"
        );
    }
    let with_header = |header: &[u8]| {
        let length = (header.len() as u64).to_le_bytes();
        open(folder.path(), "model.safetensors", &[&length, header, &[0; 8]].concat())
    };
    for header in [
        &b"not json"[..],
        b"{\"a\": 1}",
        b"\xff\xfe",
        br#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}"#,
        br#"{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}"#,
        br#"{"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}"#,
        br#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}"#,
        br#"{"a": {"dtype": "F32", "shape": [4611686018427387904, 8], "data_offsets": [0, 8]}}"#,
    ] {
        let error = with_header(header).unwrap_err();
        let header = String::from_utf8_lossy(header);
        assert!(
            matches!(error, ModelError::Weights(WeightsError::Invalid { .. })),
            "{header}: {error}"
        );
    }
    let error = open(folder.path(), "model.safetensors", &[0xff; 64]).unwrap_err();
    assert!(matches!(error, ModelError::Weights(WeightsError::Invalid { .. })), "{error}");
    let empty = tempdir().unwrap();
    assert!(matches!(Weights::open(empty.path()), Err(ModelError::MissingFile { .. })));
    assert!(matches!(Weights::open(empty.path().join("no")), Err(ModelError::Io { .. })));
}

#[test]
fn a_file_that_changed_after_opening_is_an_error() {
    let folder = tempdir().unwrap();
    let bytes = file(&[("a", Dtype::F32)]);
    let weights = open(folder.path(), "model.safetensors", &bytes).unwrap();
    fs::write(folder.path().join("model.safetensors"), &bytes[..bytes.len() - 4]).unwrap();
    let error = weights.tensor("a", [2, 3], DType::F32, &Device::flex()).unwrap_err();
    assert!(matches!(error, ModelError::Io { .. }), "{error}");
}
