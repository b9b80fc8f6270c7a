#![doc = include_str!("../README.md")]

mod config;
mod dequantize;
mod error;
mod file;
mod header;
mod layout;
mod metadata;
mod model;
mod names;
mod rope;
mod tensor_type;
mod tokenizer;
mod unpermute;

pub use error::GgufError;
pub use file::{GgufFile, TensorInfo};
pub use tensor_type::TensorType;
