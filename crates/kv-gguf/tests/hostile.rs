//! Files that are broken, on purpose or not.

use kv_gguf::GgufError;

use crate::allocation::largest;
use crate::build::{self, File, claimed_list, claimed_text, list, text, u32};
use crate::{open, read_all};

/// More than a small file needs, less than any claim below.
const LITTLE: usize = 1 << 20;

/// The error of a file, found without large allocations.
fn refused(file: &File) -> GgufError {
    let bytes = file.bytes();
    let (largest, result) = largest(|| open(&bytes).and_then(|file| read_all(&file)));
    let error = result.unwrap_err();
    assert!(largest < LITTLE, "an allocation of {largest} bytes: {error}");
    error
}

macro_rules! assert_refused {
    ($file:expr, $pattern:pat $(if $guard:expr)?) => {{
        let error = refused(&$file);
        assert!(matches!(&error, $pattern $(if $guard)?), "{error:?}");
    }};
}

#[test]
fn the_small_file_is_right() {
    let (largest, result) = largest(|| open(&File::small().bytes()).and_then(|f| read_all(&f)));
    result.unwrap();
    assert!(largest < LITTLE, "{largest}");
}

#[test]
fn a_file_that_ends_early_is_refused_at_every_byte() {
    let bytes = File::small().bytes();
    for length in 0..bytes.len() {
        let (largest, result) = largest(|| open(&bytes[..length]));
        let Err(error) = result else {
            // The padding behind the last tensor is no part of it.
            assert_eq!(bytes.len().next_multiple_of(32), bytes.len());
            assert!(bytes[length..].iter().all(|byte| *byte == 0) && bytes.len() - length < 32);
            continue;
        };
        let expected = matches!(
            error,
            GgufError::Truncated { .. } | GgufError::Count { .. } | GgufError::OutOfBounds { .. }
        );
        assert!(expected, "{length}: {error:?}");
        assert!(largest < LITTLE, "{length}: {largest}");
    }
}

#[test]
fn other_formats_and_versions() {
    let with = |magic: &[u8; 4], version: [u8; 4]| File { magic: *magic, version, ..File::small() };
    assert_refused!(with(b"GGML", [3, 0, 0, 0]), GgufError::Magic { actual } if actual == b"GGML");
    assert_refused!(with(b"GGUF", [0, 0, 0, 3]), GgufError::ByteOrder { version: 3 });
    for version in [0, 1, 4, u32::MAX] {
        let file = with(b"GGUF", version.to_le_bytes());
        assert_refused!(file, GgufError::Version { actual, .. } if *actual == version);
    }
    assert!(matches!(open(b"").unwrap_err(), GgufError::Truncated { part: "header", length: 0 }));
    let missing = kv_gguf::GgufFile::open("no/such/file".as_ref()).unwrap_err();
    assert!(matches!(&missing, GgufError::Io { .. }), "{missing}");
    assert!(missing.to_string().contains("no/such/file"));
}

#[test]
fn counts_beyond_the_file() {
    for count in [1 << 20, u64::from(u32::MAX), 1 << 62, u64::MAX] {
        let tensors = File { claims: (Some(count), None), ..File::small() };
        assert_refused!(tensors, GgufError::Count { what: "tensors", .. });
        let entries = File { claims: (None, Some(count)), ..File::small() };
        assert_refused!(entries, GgufError::Count { what: "entries of metadata", .. });
    }
    // Within the room of the file, but not there.
    let tensors = File { claims: (Some(20), None), ..File::small() };
    assert_refused!(tensors, GgufError::TensorInfo { .. } | GgufError::Truncated { .. });
    let entries = File { claims: (None, Some(40)), ..File::small() };
    assert_refused!(entries, GgufError::Metadata { .. } | GgufError::Truncated { .. });
    let layers = File::small().set("llama.block_count", u32(i32::MAX as u32));
    assert_refused!(layers, GgufError::MissingTensor { name } if name.starts_with("blk.1."));
}

#[test]
fn lengths_beyond_the_file() {
    for length in [1 << 16, 1 << 24, 1 << 32, 1 << 62, u64::MAX] {
        let tokens = claimed_list(&[text("a")], length);
        for value in [claimed_text(length), tokens, claimed_list(&[], length)] {
            let file = File::small().set("general.name", value);
            assert_refused!(file, GgufError::Metadata { .. } | GgufError::Truncated { .. });
        }
        let bytes = File::small().bytes();
        let names = b"token_embd.weight";
        for at in [24, find(&bytes, names) - 8] {
            let mut bytes = bytes.clone();
            bytes[at..at + 8].copy_from_slice(&length.to_le_bytes());
            let (largest, result) = largest(|| open(&bytes));
            let error = result.unwrap_err();
            let expected =
                matches!(error, GgufError::Metadata { .. } | GgufError::TensorInfo { .. });
            assert!(expected && largest < LITTLE, "{error}, {largest}");
        }
    }
}

fn find(bytes: &[u8], part: &[u8]) -> usize {
    bytes.windows(part.len()).position(|window| window == part).unwrap()
}

#[test]
fn values_that_are_no_values() {
    let mut nested = list(&[u32(1)]);
    let with = |value: &build::Value| File::small().set("general.name", value.clone());
    for _ in 0..8 {
        nested = list(&[nested]);
    }
    // Lists within lists are allowed where nothing reads them.
    open(&with(&nested).bytes()).unwrap();
    for _ in 0..10_000 {
        nested = list(&[nested]);
    }
    assert_refused!(with(&nested), GgufError::Metadata { .. });
    let tokens = File::small().set("tokenizer.ggml.tokens", list(&vec![list(&[u32(1)]); 4]));
    assert_refused!(tokens, GgufError::WrongType { .. });
    assert_refused!(with(&build::of_kind(13, &[0; 8])), GgufError::Metadata { .. });
    assert_refused!(with(&build::of_kind(u32::MAX, &[0; 8])), GgufError::Metadata { .. });
    assert_refused!(with(&build::of_kind(7, &[2])), GgufError::Metadata { .. });
    assert_refused!(with(&build::raw_text(b"\xff\xfe")), GgufError::Metadata { .. });
    let mut key = File::small();
    key.entries[1].0 = b"general.\xff".to_vec();
    assert_refused!(key, GgufError::Metadata { .. });
    let mut name = File::small();
    name.tensors[1].name = b"blk.\xff".to_vec();
    assert_refused!(name, GgufError::TensorInfo { index: 1, .. });
}

#[test]
fn names_that_are_there_twice() {
    let mut entries = File::small();
    entries.entries.push(entries.entries[2].clone());
    assert_refused!(entries, GgufError::Metadata { .. });
    let mut tensors = File::small();
    tensors.add("output_norm.weight", &[8]);
    assert_refused!(tensors, GgufError::DuplicateTensor { name } if name == "output_norm.weight");
}

#[test]
fn alignments_that_are_none() {
    for alignment in [0, 1, 31, 33, u32::MAX] {
        let file = File::small().set("general.alignment", u32(alignment));
        assert_refused!(file, GgufError::Metadata { .. });
    }
    let odd = File::small().set("general.alignment", u32(24));
    assert_refused!(odd, GgufError::Alignment { actual: 24 });
    let huge = File::small().set("general.alignment", u32(1 << 31));
    assert_refused!(huge, GgufError::Truncated { .. });
    let kind = File::small().set("general.alignment", text("32"));
    assert_refused!(kind, GgufError::Metadata { .. });
    // Offsets that are multiples of 32, but not of 64.
    let other = File::small().set("general.alignment", u32(64));
    let other = File { alignment: 64, ..other };
    assert_refused!(other, GgufError::Misaligned { alignment: 64, .. });
}

#[test]
fn offsets_that_are_not_in_the_file() {
    let name = "blk.0.attn_v.weight";
    let at = |offset: u64| File::small().change(name, |tensor| tensor.offset = offset);
    let end = File::small().data.len() as u64;
    for offset in [end, end - 32, 1 << 40, u64::MAX - 31, u64::MAX / 32 * 32] {
        assert_refused!(at(offset), GgufError::OutOfBounds { .. });
    }
    // An offset counts from the end of the header: one that wraps around would be within it.
    assert_refused!(at(0_u64.wrapping_sub(64)), GgufError::OutOfBounds { .. });
    assert_refused!(at(1), GgufError::Misaligned { actual: 1, alignment: 32, .. });
    assert_refused!(at(0), GgufError::Overlap { .. });
    assert_refused!(at(32), GgufError::Overlap { .. });
}

#[test]
fn dimensions_that_cannot_be() {
    let name = "blk.0.attn_v.weight";
    let with = |dims: &[u64]| File::small().change(name, |tensor| tensor.dims = dims.to_vec());
    for dims in [[u64::MAX, 2], [1 << 32, 1 << 32], [1 << 62, 4], [u64::MAX, u64::MAX]] {
        assert_refused!(with(&dims), GgufError::TensorInfo { .. });
    }
    assert_refused!(with(&[1 << 40, 1 << 20]), GgufError::OutOfBounds { .. });
    assert_refused!(with(&[]), GgufError::TensorInfo { .. });
    assert_refused!(with(&[1; 5]), GgufError::TensorInfo { .. });
    for dims in [vec![0], vec![8, 0], vec![0, u64::MAX]] {
        assert_refused!(with(&dims), GgufError::EmptyTensor { .. });
    }
    for dims in [vec![4, 8], vec![32], vec![8, 3], vec![8, 2, 2], vec![8, 4, 1]] {
        assert_refused!(with(&dims), GgufError::Shape { expected, .. } if *expected == [4, 8]);
    }
    // Rows of 8 are no whole blocks.
    for kind in [2, 3, 6, 7, 8, 12, 13, 14] {
        let file = File::small().change(name, |tensor| tensor.kind = kind);
        assert_refused!(file, GgufError::TensorInfo { .. });
    }
}

#[test]
fn types_that_are_not_supported() {
    for kind in [24, 26, 27, 28] {
        let file = File::small().change("output_norm.weight", |tensor| tensor.kind = kind);
        assert_refused!(file, GgufError::TensorType { actual, .. } if *actual == kind);
        assert!(refused(&file).to_string().contains("Q4_K (12)"));
    }
    for kind in [4, 5, 31, 99, u32::MAX] {
        let file = File::small().change("output_norm.weight", |tensor| tensor.kind = kind);
        assert_refused!(file, GgufError::TensorInfo { .. });
    }
}

#[test]
fn models_that_are_not_supported() {
    let qwen = File::small().set("general.architecture", text("qwen2"));
    assert_refused!(qwen, GgufError::Architecture { supported: "llama", .. });
    assert!(refused(&qwen).to_string().contains(r#""qwen2", supported is "llama""#));
    let long = File::small().set("general.architecture", text(&"\u{1b}".repeat(9999)));
    assert!(refused(&long).to_string().len() < 1000);
    for name in ["blk.0.ffn_gate_inp.weight", "blk.1.attn_q.weight", "blk.00.attn_q.weight", "x"] {
        let mut file = File::small();
        file.add(name, &[8]);
        assert_refused!(file, GgufError::UnknownTensor { name: actual, .. } if actual == name);
    }
    for name in ["token_embd.weight", "output_norm.weight", "blk.0.ffn_up.weight"] {
        let mut file = File::small();
        file.tensors.retain(|tensor| tensor.name != name.as_bytes());
        assert_refused!(file, GgufError::MissingTensor { name: actual } if actual == name);
    }
    let vocab = File::small().set("llama.vocab_size", u32(5));
    assert_refused!(vocab, GgufError::VocabSize { rows: 4, actual: 5, .. });
    let tokens = File::small().set("tokenizer.ggml.tokens", list(&["a", "b"].map(text)));
    assert_refused!(tokens, GgufError::VocabSize { rows: 4, actual: 2, .. });
}
