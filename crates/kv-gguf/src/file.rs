//! A GGUF file as a Hugging Face model.

use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::header::Header;
use crate::layout::{self, Stored};
use crate::metadata::Metadata;
use crate::model::Model;
use crate::names::{self, Named, ROPE_FACTORS};
use crate::unpermute::unpermute;
use crate::{GgufError, TensorType, config, dequantize, tokenizer};

/// A GGUF file of a Llama model, open for reading.
///
/// Metadata and names are in memory, the numbers of tensors are not.
pub struct GgufFile {
    path: PathBuf,
    file: Mutex<File>,
    metadata: Metadata,
    model: Model,
    stored: Vec<Stored>,
    named: Vec<Named>,
}

/// A tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name in Hugging Face's form, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// The shape, `[out, in]` of a matrix.
    pub shape: Vec<usize>,
    /// The form in which the file stores the numbers.
    pub kind: TensorType,
}

impl GgufFile {
    /// Opens a file and checks it: the header, the metadata, that every tensor is within the file,
    /// and that the tensors are those of the model that the metadata describe.
    ///
    /// Memory is bounded by what the file has, not by what it claims.
    ///
    /// # Errors
    /// [`GgufError`] names what is wrong with the file.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let failed = |source| GgufError::io(path, source);
        let file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut reader = BufReader::new(file);
        let header = Header::read(&mut reader, path, length)?;
        let metadata = Metadata::read(&mut reader, header.entries, path, length)?;
        let stored = layout::read(&mut reader, header.tensors, &metadata, path, length)?;
        let model = Model::read(&metadata, &stored)?;
        let named = names::name_all(&model, &stored)?;
        let file = Mutex::new(reader.into_inner());
        Ok(Self { path: path.to_owned(), file, metadata, model, stored, named })
    }

    /// The model's `config.json` in Hugging Face's form.
    ///
    /// # Errors
    /// [`GgufError::MissingKey`], [`GgufError::WrongType`] and [`GgufError::Value`] for the
    /// metadata, [`GgufError::RopeFactors`], [`GgufError::Io`].
    pub fn config(&self) -> Result<serde_json::Value, GgufError> {
        let factors = self.stored.iter().find(|tensor| tensor.name == ROPE_FACTORS);
        let factors = factors.map(|tensor| self.rope_factors(tensor)).transpose()?;
        config::config(&self.metadata, &self.model, &self.stored, factors.as_deref())
    }

    /// The tokenizer in the form of `tokenizer.json`.
    ///
    /// # Errors
    /// [`GgufError::MissingKey`], [`GgufError::WrongType`] and [`GgufError::Value`] for the
    /// metadata, [`GgufError::DuplicateToken`], [`GgufError::Merge`].
    pub fn tokenizer(&self) -> Result<serde_json::Value, GgufError> {
        tokenizer::tokenizer(&self.metadata, self.model.vocab)
    }

    /// The template of chats, in Jinja.
    pub fn chat_template(&self) -> Option<&str> {
        self.metadata.text("tokenizer.chat_template").ok().flatten()
    }

    /// All tensors of the model, in the order of the file.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo> {
        self.named.iter().map(|named| {
            let stored = &self.stored[named.index];
            TensorInfo { name: named.name.clone(), shape: stored.shape.clone(), kind: stored.kind }
        })
    }

    /// The numbers of one tensor in f32, row by row. Rows of queries and keys are in Hugging
    /// Face's order.
    ///
    /// # Errors
    /// [`GgufError::MissingTensor`] for another name than those of [`Self::tensors`],
    /// [`GgufError::Io`].
    pub fn read(&self, name: &str) -> Result<Vec<f32>, GgufError> {
        let named = self.named.iter().find(|named| named.name == name);
        let named = named.ok_or_else(|| GgufError::MissingTensor { name: name.to_owned() })?;
        let stored = &self.stored[named.index];
        let numbers = self.numbers(stored)?;
        let width = stored.shape.get(1).copied().unwrap_or(1);
        Ok(match named.rotated_heads {
            Some(heads) => unpermute(&numbers, heads, width),
            None => numbers,
        })
    }

    fn rope_factors(&self, stored: &Stored) -> Result<Vec<f32>, GgufError> {
        let expected = vec![self.model.head_dim / 2];
        if stored.shape != expected {
            let (name, actual) = (ROPE_FACTORS.to_owned(), stored.shape.clone());
            return Err(GgufError::Shape { name, expected, actual });
        }
        self.numbers(stored)
    }

    /// The numbers in the order of the file.
    fn numbers(&self, stored: &Stored) -> Result<Vec<f32>, GgufError> {
        let mut bytes = vec![0; stored.bytes];
        {
            // A panic elsewhere leaves the file as usable as before: each read seeks first.
            let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
            let read =
                file.seek(SeekFrom::Start(stored.start)).and_then(|_| file.read_exact(&mut bytes));
            read.map_err(|source| GgufError::io(&self.path, source))?;
        }
        Ok(dequantize::dequantize(stored.kind, &bytes))
    }
}

impl fmt::Debug for GgufFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgufFile")
            .field("path", &self.path)
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}
