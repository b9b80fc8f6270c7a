//! A GGUF file, whose tensors come back dequantised.

use std::collections::BTreeMap;
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};

use kv_gguf::GgufFile;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;

use crate::error::{ModelError, Result};

/// A GGUF file as a file of f32 tensors.
#[derive(Debug)]
pub(super) struct GgufTensors {
    path: PathBuf,
    file: GgufFile,
    tensors: BTreeMap<String, TensorInfo>,
}

impl GgufTensors {
    pub(super) fn new(path: &Path, file: GgufFile) -> Self {
        let info = |own: kv_gguf::TensorInfo| {
            let bytes = own.shape.iter().product::<usize>() * size_of::<f32>();
            let info = TensorInfo { dtype: Dtype::F32, shape: own.shape, data_offsets: (0, bytes) };
            (own.name, info)
        };
        let tensors = file.tensors().map(info).collect();
        Self { path: path.into(), file, tensors }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        self.tensors.keys().cloned()
    }

    pub(super) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// The bytes of one tensor that `info` points to, in f32. All of the tensor is dequantised.
    pub(super) fn read(&self, name: &str, info: &TensorInfo) -> Result<Box<dyn Read>> {
        let numbers =
            self.file.read(name).map_err(|source| ModelError::gguf(&self.path, source))?;
        let (from, to) = info.data_offsets;
        let numbers = &numbers[from / size_of::<f32>()..to / size_of::<f32>()];
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        Ok(Box::new(Cursor::new(bytes)))
    }
}
