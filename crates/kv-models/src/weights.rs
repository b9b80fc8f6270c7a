//! Weights from safetensors, one file or shards with an index, or from a GGUF file.

mod decode;
mod file;
mod gguf;
mod part;
#[cfg(test)]
mod tests;
mod unused;

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device, Tensor};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::Deserialize;

use crate::error::{ModelError, Result, WeightsError};
use file::SafetensorsFile;
use gguf::GgufTensors;
use kv_gguf::GgufFile;
use part::ColumnReader;
pub(crate) use part::Part;

/// Bytes of a tensor that are read at a time.
const PIECE: usize = 1 << 20;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The tensors of a model, by their Hugging Face names.
///
/// Only the headers are kept in memory: each tensor is read from its file when it is asked for.
#[derive(Debug)]
pub struct Weights {
    files: Vec<WeightFile>,
    /// Which file holds a tensor.
    tensors: BTreeMap<String, usize>,
}

/// A file of tensors.
#[derive(Debug)]
enum WeightFile {
    Safetensors(SafetensorsFile),
    Gguf(GgufTensors),
}

impl WeightFile {
    fn path(&self) -> &Path {
        match self {
            Self::Safetensors(file) => file.path(),
            Self::Gguf(file) => file.path(),
        }
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        match self {
            Self::Safetensors(file) => file.info(name),
            Self::Gguf(file) => file.info(name),
        }
    }

    /// The bytes of the tensor of this name that `info` points to.
    fn read(&self, name: &str, info: &TensorInfo) -> Result<Box<dyn Read>> {
        match self {
            Self::Safetensors(file) => file.read(info),
            Self::Gguf(file) => file.read(name, info),
        }
    }
}

/// The part of an index that matters here.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Weights {
    /// Opens a safetensors file, or a folder with `model.safetensors`, or with
    /// `model.safetensors.index.json` and its shards, or with a single `*.safetensors` file of
    /// another name.
    ///
    /// # Errors
    /// [`ModelError::MissingFile`] names the file, or shard, that is not there;
    /// [`ModelError::InvalidJson`] for a bad index; [`WeightsError::Truncated`] and
    /// [`WeightsError::Invalid`] for a bad file; [`ModelError::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.is_file() {
            return Ok(Self::single(SafetensorsFile::open(path)?));
        }
        if path.join(SINGLE).is_file() {
            return Ok(Self::single(SafetensorsFile::open(&path.join(SINGLE))?));
        }
        if path.join(INDEX).is_file() {
            return Self::from_index(path);
        }
        Ok(Self::single(SafetensorsFile::open(&only_file(path)?)?))
    }

    /// Reads a safetensors file that is in memory, such as the embedded model.
    ///
    /// # Errors
    /// [`WeightsError::Truncated`], [`WeightsError::Invalid`].
    pub fn from_bytes(bytes: &'static [u8]) -> Result<Self> {
        Ok(Self::single(SafetensorsFile::from_bytes(bytes)?))
    }

    /// The tensors of a GGUF file, in f32.
    pub(crate) fn from_gguf(path: &Path, file: GgufFile) -> Self {
        let file = GgufTensors::new(path, file);
        let tensors = file.names().map(|name| (name, 0)).collect();
        Self { files: vec![WeightFile::Gguf(file)], tensors }
    }

    fn single(file: SafetensorsFile) -> Self {
        let tensors = file.names().map(|name| (name, 0)).collect();
        Self { files: vec![WeightFile::Safetensors(file)], tensors }
    }

    fn from_index(folder: &Path) -> Result<Self> {
        let path = folder.join(INDEX);
        let mut files = Vec::new();
        let mut tensors = BTreeMap::new();
        let mut opened = BTreeMap::new();
        for (name, shard) in read_index(&path)? {
            let file = match opened.get(&shard) {
                Some(file) => *file,
                None => {
                    files.push(WeightFile::Safetensors(open_shard(folder, &shard)?));
                    opened.insert(shard, files.len() - 1);
                    files.len() - 1
                }
            };
            // A tensor that the index promises and the shard lacks is missing when asked for.
            if files[file].info(&name).is_some() {
                tensors.insert(name, file);
            }
        }
        Ok(Self { files, tensors })
    }

    /// Where a tensor is.
    fn find(&self, name: &str) -> Result<(&WeightFile, &TensorInfo)> {
        let file = self.tensors.get(name).map(|file| &self.files[*file]);
        let found = file.and_then(|file| Some((file, file.info(name)?)));
        let missing = || WeightsError::MissingTensor {
            name: name.to_string(),
            files: self.files.len(),
            tensors: self.tensors.len(),
        };
        Ok(found.ok_or_else(missing)?)
    }

    /// Reads one tensor.
    ///
    /// The file may hold it in f32, f16 or bf16; it comes back as `dtype`, one of the same three,
    /// rounded to nearest.
    ///
    /// # Errors
    /// [`WeightsError::MissingTensor`]; [`WeightsError::WrongShape`] if the shape is not
    /// `expected`; [`WeightsError::WrongDtype`]; [`WeightsError::OutOfRange`] if conversion to a
    /// narrower type overflows; [`ModelError::Io`].
    pub fn tensor<const D: usize>(
        &self,
        name: &str,
        expected: [usize; D],
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor<D>> {
        self.part(name, expected, &Part::Whole, dtype, device)
    }

    /// [`Self::tensor`] of which only a part is read; `expected` is the shape of the whole.
    ///
    /// # Errors
    /// The errors of [`Self::tensor`].
    pub(crate) fn part<const D: usize>(
        &self,
        name: &str,
        expected: [usize; D],
        part: &Part,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor<D>> {
        let (file, info) = self.find(name)?;
        if info.shape != expected {
            return Err(WeightsError::WrongShape {
                name: name.to_string(),
                expected: expected.to_vec(),
                actual: info.shape.clone(),
            }
            .into());
        }
        let mut reader = file.read(name, &part.bytes_of(info))?;
        if let Part::Columns(columns) = part {
            reader = Box::new(ColumnReader::new(reader, info, columns));
        }
        let data = decode::decode(&mut *reader, name, &part.of(info), dtype, file.path())?;
        Ok(Tensor::from_data(data, (device, dtype)))
    }

    /// Whether two tensors hold the same numbers in the same type and shape.
    ///
    /// # Errors
    /// [`WeightsError::MissingTensor`]; [`ModelError::Io`].
    pub fn are_equal(&self, one: &str, other: &str) -> Result<bool> {
        let ((file, info), (other_file, other_info)) = (self.find(one)?, self.find(other)?);
        if (info.dtype, &info.shape) != (other_info.dtype, &other_info.shape) {
            return Ok(false);
        }
        let (mut left, mut right) = (file.read(one, info)?, other_file.read(other, other_info)?);
        let (mut pieces, mut bytes) = ([vec![0; PIECE], vec![0; PIECE]], info.data_offsets);
        while bytes.0 < bytes.1 {
            let size = PIECE.min(bytes.1 - bytes.0);
            let [one, other] = pieces.each_mut().map(|piece| &mut piece[..size]);
            left.read_exact(one).map_err(|source| ModelError::io(file.path(), source))?;
            right.read_exact(other).map_err(|source| ModelError::io(other_file.path(), source))?;
            if one != other {
                return Ok(false);
            }
            bytes.0 += size;
        }
        Ok(true)
    }

    /// The type of the first tensor, by name, in f32, f16 or bf16. A model has it whose
    /// configuration names no type.
    pub fn dtype(&self) -> Option<DType> {
        self.tensors.iter().find_map(|(name, file)| match self.files[*file].info(name)?.dtype {
            Dtype::F32 => Some(DType::F32),
            Dtype::F16 => Some(DType::F16),
            Dtype::BF16 => Some(DType::BF16),
            _ => None,
        })
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}

/// Which file holds each tensor, as an index says.
///
/// # Errors
/// [`ModelError::Io`], [`ModelError::InvalidJson`].
fn read_index(path: &Path) -> Result<BTreeMap<String, String>> {
    let text = std::fs::read_to_string(path).map_err(|source| ModelError::io(path, source))?;
    let invalid =
        |reason: String| ModelError::InvalidJson { file: path.display().to_string(), reason };
    let index: Index = serde_json::from_str(&text).map_err(|error| invalid(error.to_string()))?;
    for shard in index.weight_map.values() {
        // The index comes with the model: it must not point elsewhere on this machine.
        if Path::new(shard).file_name().is_none_or(|name| name != shard.as_str()) {
            return Err(invalid(format!("`{shard}` is not the plain name of a file")));
        }
    }
    Ok(index.weight_map)
}

/// The distinct files that an index names.
pub(crate) fn shards(index: &Path) -> Result<Vec<String>> {
    let mut shards: Vec<String> = read_index(index)?.into_values().collect();
    shards.sort_unstable();
    shards.dedup();
    Ok(shards)
}

fn open_shard(folder: &Path, shard: &str) -> Result<SafetensorsFile> {
    let path = folder.join(shard);
    if !path.is_file() {
        let hint = format!("`{INDEX}` names it: download the missing shard");
        return Err(ModelError::MissingFile { path, hint });
    }
    SafetensorsFile::open(&path)
}

/// The one `*.safetensors` file of a folder without the usual names.
fn only_file(folder: &Path) -> Result<PathBuf> {
    let io = |source| ModelError::io(folder, source);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.is_file() && path.extension().is_some_and(|extension| extension == "safetensors") {
            found.push(path);
        }
    }
    match found.as_slice() {
        [path] => Ok(path.clone()),
        [] => Err(ModelError::MissingFile {
            path: folder.join(SINGLE),
            hint: format!("neither is `{INDEX}` nor any other *.safetensors file there"),
        }),
        several => Err(ModelError::MissingFile {
            path: folder.join(SINGLE),
            hint: format!(
                "of the {} *.safetensors files there it is unclear which to read: name one \
                 `{SINGLE}`, leave only one in the folder, or add the `{INDEX}` of shards",
                several.len()
            ),
        }),
    }
}
