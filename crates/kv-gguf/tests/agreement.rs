//! Numbers, names and shapes, compared with what Python's `gguf` makes of the same files.

use std::collections::BTreeSet;

use kv_gguf::{GgufError, GgufFile, TensorType};
use serde::Deserialize;
use strum::VariantArray;

use crate::build::File;
use crate::{fixture, open, read_all};

#[derive(Deserialize)]
struct Verdict {
    name: String,
    shape: Vec<usize>,
    fnv: String,
    first: Vec<f32>,
    last: Vec<f32>,
}

/// FNV-1a of 64 bits, of the numbers' little-endian bytes.
fn fnv(numbers: &[f32]) -> String {
    let bytes = numbers.iter().flat_map(|number| number.to_le_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    format!("{hash:016x}")
}

fn agrees(name: &str) -> GgufFile {
    let file = GgufFile::open(&fixture(&format!("{name}.gguf"))).unwrap();
    let verdicts = std::fs::read_to_string(fixture(&format!("{name}.json"))).unwrap();
    let verdicts: Vec<Verdict> = serde_json::from_str(&verdicts).unwrap();
    let shapes: BTreeSet<_> = file.tensors().map(|tensor| (tensor.name, tensor.shape)).collect();
    let expected = verdicts.iter().map(|verdict| (verdict.name.clone(), verdict.shape.clone()));
    assert_eq!(shapes, expected.collect());
    for verdict in verdicts {
        let numbers = file.read(&verdict.name).unwrap();
        assert_eq!(numbers[..4], verdict.first, "{}", verdict.name);
        assert_eq!(numbers[numbers.len() - 4..], verdict.last, "{}", verdict.name);
        assert_eq!(fnv(&numbers), verdict.fnv, "{}", verdict.name);
    }
    file
}

#[test]
fn all_types_decode_to_the_same_bits() {
    let file = agrees("types");
    let there: BTreeSet<u32> = file.tensors().map(|tensor| tensor.kind as u32).collect();
    assert_eq!(there, TensorType::VARIANTS.iter().map(|kind| *kind as u32).collect());
}

#[test]
fn biases_and_output_matrices_are_read() {
    let file = agrees("llama3");
    assert_eq!(file.chat_template(), Some("{{ messages[0]['content'] }}"));
}

#[test]
fn rows_of_a_head_are_put_back() {
    let file = open(&File::small().bytes()).unwrap();
    let first = |name: &str| -> Vec<f32> {
        let numbers = file.read(&format!("model.layers.0.self_attn.{name}.weight")).unwrap();
        numbers.chunks(8).map(|row| row[0] / 8.0).collect()
    };
    assert_eq!(first("q_proj"), [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
    assert_eq!(first("k_proj"), [0.0, 2.0, 1.0, 3.0]);
    assert_eq!(first("v_proj"), [0.0, 1.0, 2.0, 3.0]);
    let missing = file.read("model.layers.1.self_attn.q_proj.weight").unwrap_err();
    assert!(matches!(missing, GgufError::MissingTensor { .. }), "{missing}");
}

#[test]
fn version_2_and_files_without_tokenizers_are_read() {
    let mut file = File::small();
    file.version = 2_u32.to_le_bytes();
    read_all(&open(&file.bytes()).unwrap()).unwrap();
    let mut bare = File::small();
    bare.entries.retain(|(key, _)| !key.starts_with(b"tokenizer."));
    let bare = open(&bare.bytes()).unwrap();
    assert!(bare.config().unwrap()["eos_token_id"].is_null());
    assert_eq!(bare.chat_template(), None);
    let error = bare.tokenizer().unwrap_err();
    assert!(matches!(error, GgufError::MissingKey { .. }), "{error}");
}
