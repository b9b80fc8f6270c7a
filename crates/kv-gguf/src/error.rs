//! Why a file cannot be read.

use std::path::{Path, PathBuf};

use crate::TensorType;

/// Why a GGUF file cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file cannot be opened or read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The file does not begin with the four letters `GGUF`.
    #[error("a GGUF file begins with {expected:?}, this file with {actual:?}", expected = b"GGUF")]
    Magic {
        /// The first four bytes.
        actual: [u8; 4],
    },
    /// The numbers of the file are big-endian.
    #[error("the file is big-endian (version {version}), expected little-endian")]
    ByteOrder {
        /// The version, read as big-endian.
        version: u32,
    },
    /// The version of the format is not supported.
    #[error("the file has version {actual} of GGUF, supported are {supported:?}")]
    Version {
        /// The version of the file.
        actual: u32,
        /// The versions that can be read.
        supported: &'static [u32],
    },
    /// The file ends too early.
    #[error("the file ends after {length} bytes, within its {part}")]
    Truncated {
        /// The part in which it ends.
        part: &'static str,
        /// The length of the file in bytes.
        length: u64,
    },
    /// The header claims more entries than the file has room for.
    #[error("the header claims {actual} {what}, a file of this length has room for {most}")]
    Count {
        /// What is counted.
        what: &'static str,
        /// The number in the header.
        actual: u64,
        /// The most entries that could be in the file.
        most: u64,
    },
    /// The metadata are malformed.
    #[error("malformed metadata: {reason}")]
    Metadata {
        /// What is wrong, with the value and its limit.
        reason: String,
    },
    /// The description of a tensor is malformed.
    #[error("malformed description of tensor {index} of {count}: {reason}")]
    TensorInfo {
        /// Which tensor, counted from 0.
        index: u64,
        /// The number of tensors in the header.
        count: u64,
        /// What is wrong, with the value and its limit.
        reason: String,
    },
    /// The alignment of the tensors is no power of two.
    #[error("general.alignment is {actual}, expected a power of two")]
    Alignment {
        /// The alignment in the metadata.
        actual: u64,
    },
    /// Two tensors have the same name.
    #[error("two tensors have the name {name:?}")]
    DuplicateTensor {
        /// The name in the file.
        name: String,
    },
    /// The numbers of a tensor are stored in a form that is not supported.
    #[error(
        "tensor {name:?} has type {actual}, supported are {supported}",
        supported = TensorType::supported()
    )]
    TensorType {
        /// The name in the file.
        name: String,
        /// The number of the type in GGUF.
        actual: u32,
    },
    /// A tensor has no numbers.
    #[error("tensor {name:?} has the dimensions {actual:?}, expected at least 1 in each")]
    EmptyTensor {
        /// The name in the file.
        name: String,
        /// The dimensions, the innermost first.
        actual: Vec<u64>,
    },
    /// The numbers of a tensor do not begin at a multiple of the alignment.
    #[error("tensor {name:?} begins at {actual}, expected a multiple of {alignment}")]
    Misaligned {
        /// The name in the file.
        name: String,
        /// The offset in bytes.
        actual: u64,
        /// The alignment in bytes.
        alignment: u64,
    },
    /// The numbers of a tensor are not all within the file.
    #[error(
        "tensor {name:?} has {bytes} bytes at {offset} after the header, which ends at {header}; \
         the file has {length} bytes"
    )]
    OutOfBounds {
        /// The name in the file.
        name: String,
        /// The offset in bytes, after the header.
        offset: u64,
        /// The size in bytes.
        bytes: u64,
        /// Where the header ends, with its padding.
        header: u64,
        /// The length of the file in bytes.
        length: u64,
    },
    /// Two tensors share bytes.
    #[error("tensor {name:?} begins at {actual}, before {before:?} ends at {end}")]
    Overlap {
        /// The tensor that begins later.
        name: String,
        /// Its offset in bytes.
        actual: u64,
        /// The tensor that begins earlier.
        before: String,
        /// Where that tensor ends.
        end: u64,
    },
    /// A key is absent from the metadata.
    #[error("the metadata lack {key}")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A value of the metadata has another type.
    #[error("{key} is {actual}, expected {expected}")]
    WrongType {
        /// The key.
        key: String,
        /// The expected type.
        expected: &'static str,
        /// The type in the file.
        actual: String,
    },
    /// A value of the metadata is out of range or not supported.
    #[error("{key} is {actual}, expected {expected}")]
    Value {
        /// The key.
        key: String,
        /// What is supported.
        expected: String,
        /// The value in the file.
        actual: String,
    },
    /// The model has another architecture.
    #[error("the architecture is {actual}, supported is {supported:?}")]
    Architecture {
        /// The beginning of the name in the file, quoted.
        actual: String,
        /// The name that is supported.
        supported: &'static str,
    },
    /// A tensor of the file is no part of the models that are supported.
    #[error("tensor {name:?} is no tensor of a Llama model of {layers} layers")]
    UnknownTensor {
        /// The name in the file.
        name: String,
        /// The number of layers in the metadata.
        layers: usize,
    },
    /// The file lacks a tensor.
    #[error("there is no tensor {name:?}")]
    MissingTensor {
        /// The name, in the form in which it was asked for.
        name: String,
    },
    /// A tensor's shape is not the one that the metadata imply.
    #[error("tensor {name:?} has the shape {actual:?}, expected {expected:?}")]
    Shape {
        /// The name in Hugging Face's form.
        name: String,
        /// The expected shape, `[out, in]`.
        expected: Vec<usize>,
        /// The shape in the file, `[out, in]`.
        actual: Vec<usize>,
    },
    /// The embedding has another number of rows than there are tokens.
    #[error("the embedding has {rows} rows, but {key} says {actual} tokens")]
    VocabSize {
        /// The rows of the embedding.
        rows: usize,
        /// The key of the metadata that differs.
        key: String,
        /// What it says.
        actual: usize,
    },
    /// The factors of the rotary embedding's frequencies are not those of a known scaling.
    #[error(
        "rope_freqs.weight is {actual} at {index}, expected {expected}, as Llama 3 scales \
         by {factor}"
    )]
    RopeFactors {
        /// Which frequency, counted from the highest.
        index: usize,
        /// The factor by Llama 3's rule.
        expected: f64,
        /// The factor in the file.
        actual: f64,
        /// The largest factor in the file.
        factor: f64,
    },
    /// Two tokens have the same text.
    #[error("tokens {first} and {second} are both {token}")]
    DuplicateToken {
        /// The beginning of the text, quoted.
        token: String,
        /// The id of the first.
        first: usize,
        /// The id of the second.
        second: usize,
    },
    /// A merge of the tokenizer is malformed.
    #[error("merge {index} is {merge}, expected two tokens whose concatenation is a token")]
    Merge {
        /// Which merge, counted from 0.
        index: usize,
        /// The beginning of its text, quoted.
        merge: String,
    },
}

impl GgufError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }
}

/// A text of the file for a message: its beginning, quoted.
pub(crate) fn quoted(text: &str) -> String {
    const MOST: usize = 80;
    let beginning: String = text.chars().take(MOST).collect();
    let rest = if beginning.len() < text.len() { "..." } else { "" };
    format!("{beginning:?}{rest}")
}
