//! Why weights could not be read.

use std::path::PathBuf;

use kv_core::counted;

/// What is wrong with a safetensors file, or with a tensor in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// A safetensors file ends before the data that its header announces.
    #[error(
        "`{path}` is truncated: its header announces {expected} bytes, it has {actual}; download \
         it again"
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes that the header announces, itself included.
        expected: u64,
        /// Bytes that the file has.
        actual: u64,
    },

    /// A file is no safetensors file, or its header contradicts itself.
    #[error("`{path}` is not a valid safetensors file: {reason}; download it again")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },

    /// The model's files hold no tensor of this name.
    #[error(
        "the weights hold no tensor `{name}` ({} with {} searched); \
             `config.json` and the weights must belong to the same model",
        counted(*files, "file"),
        counted(*tensors, "tensor")
    )]
    MissingTensor {
        /// The tensor asked for.
        name: String,
        /// Number of files searched.
        files: usize,
        /// Number of tensors in them.
        tensors: usize,
    },

    /// The model's files hold more layers than the configuration says.
    #[error(
        "the weights have {actual} layers, `num_hidden_layers` is {expected}; `config.json` and \
             the weights must belong to the same model"
    )]
    MoreLayers {
        /// Layers that the configuration says.
        expected: usize,
        /// Layers in the files.
        actual: usize,
    },

    /// The model's files hold tensors that the configuration does not announce and that would
    /// change what the model computes.
    #[error(
        "the weights hold tensors that `config.json` does not announce and that would change the \
             model's output: {}; `config.json` and the weights must belong to the same model",
        listed(.names)
    )]
    NotAnnounced {
        /// The tensors, sorted.
        names: Vec<String>,
    },

    /// A tensor has another shape than the configuration says.
    #[error(
        "tensor `{name}` has shape {actual:?}, expected {expected:?}; `config.json` and the \
             weights must belong to the same model"
    )]
    WrongShape {
        /// The tensor.
        name: String,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
        /// The shape in the file.
        actual: Vec<usize>,
    },

    /// A tensor is stored, or asked for, in a type that is not supported.
    #[error("tensor `{name}`: type {actual} is not supported; supported: {supported}")]
    WrongDtype {
        /// The tensor.
        name: String,
        /// Its type.
        actual: String,
        /// The types that are supported.
        supported: &'static str,
    },

    /// Conversion of a weight gave NaN or Inf.
    #[error(
        "tensor `{name}` does not fit into {dtype}: element {index} is {value} there; load the \
             model in bf16 or f32"
    )]
    OutOfRange {
        /// The tensor.
        name: String,
        /// The type converted to.
        dtype: &'static str,
        /// Index of the first such element, in row-major order.
        index: usize,
        /// What it became.
        value: f32,
    },
}

/// The first few of many names.
pub(crate) fn listed(names: &[String]) -> String {
    const SHOWN: usize = 4;
    let quoted: Vec<String> = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => quoted.join(", "),
        more => format!("{} and {more} more", quoted.join(", ")),
    }
}
