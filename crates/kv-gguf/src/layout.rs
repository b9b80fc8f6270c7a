//! Where each tensor is in the file, and that it is there.

use std::collections::BTreeSet;
use std::io::{BufRead, ErrorKind, Seek};
use std::path::Path;

use gguf_rs_lib::GGUFError;
use gguf_rs_lib::format::TensorInfo as Described;

use crate::metadata::Metadata;
use crate::{GgufError, TensorType};

const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;

/// A tensor of the file.
#[derive(Debug)]
pub(crate) struct Stored {
    /// The name in the file.
    pub(crate) name: String,
    /// The shape, the outermost dimension first, as Hugging Face writes it.
    pub(crate) shape: Vec<usize>,
    pub(crate) kind: TensorType,
    /// The first byte, counted from the beginning of the file.
    pub(crate) start: u64,
    pub(crate) bytes: usize,
}

/// Reads the descriptions of `count` tensors, in the order of the file.
///
/// The crate that parses a description bounds the name's length, the number of dimensions and
/// their product. Here are the checks that it leaves to its caller.
pub(crate) fn read(
    reader: &mut (impl BufRead + Seek),
    count: u64,
    metadata: &Metadata,
    path: &Path,
    length: u64,
) -> Result<Vec<Stored>, GgufError> {
    let alignment = metadata.unsigned(ALIGNMENT_KEY)?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() {
        return Err(GgufError::Alignment { actual: alignment });
    }
    let described = descriptions(reader, count, path, length)?;
    let end = reader.stream_position().map_err(|source| GgufError::io(path, source))?;
    let truncated = || GgufError::Truncated { part: "padding after the header", length };
    let header = match end.checked_next_multiple_of(alignment) {
        Some(header) if header <= length => header,
        _ if described.is_empty() => end,
        _ => return Err(truncated()),
    };
    let place = |described| Stored::new(described, alignment, header, length);
    let stored: Vec<Stored> = described.into_iter().map(place).collect::<Result<_, _>>()?;
    check_names(&stored)?;
    check_overlap(&stored)?;
    Ok(stored)
}

fn descriptions(
    reader: &mut impl BufRead,
    count: u64,
    path: &Path,
    length: u64,
) -> Result<Vec<Described>, GgufError> {
    let truncated = || GgufError::Truncated { part: "descriptions of tensors", length };
    let mut all = Vec::new();
    for index in 0..count {
        all.push(Described::read_from(reader).map_err(|error| match error {
            GGUFError::UnexpectedEof => truncated(),
            GGUFError::Io(source) if source.kind() == ErrorKind::UnexpectedEof => truncated(),
            GGUFError::Io(source) => GgufError::io(path, source),
            error => GgufError::TensorInfo { index, count, reason: error.to_string() },
        })?);
    }
    Ok(all)
}

impl Stored {
    fn new(
        described: Described,
        alignment: u64,
        header: u64,
        length: u64,
    ) -> Result<Self, GgufError> {
        let Described { name, dimensions, tensor_type, offset, .. } = described;
        let Some(kind) = TensorType::from_repr(tensor_type) else {
            return Err(GgufError::TensorType { name, actual: tensor_type });
        };
        if dimensions.contains(&0) {
            return Err(GgufError::EmptyTensor { name, actual: dimensions });
        }
        if !offset.is_multiple_of(alignment) {
            return Err(GgufError::Misaligned { name, actual: offset, alignment });
        }
        // The blocks of a row are whole: the parser checks that. The product saturates only beyond
        // the length of any file.
        let numbers = dimensions.iter().fold(1, |product: u64, dim| product.saturating_mul(*dim));
        let bytes = (numbers / kind.block_len() as u64).saturating_mul(kind.block_bytes() as u64);
        let start = header.saturating_add(offset);
        let (Ok(in_memory), true) =
            (usize::try_from(bytes), start.checked_add(bytes).is_some_and(|end| end <= length))
        else {
            return Err(GgufError::OutOfBounds { name, offset, bytes, header, length });
        };
        // Within the file, so each dimension is at most a few times its length.
        let shape = dimensions.iter().rev().map(|dim| *dim as usize).collect();
        Ok(Self { name, shape, kind, start, bytes: in_memory })
    }

    fn end(&self) -> u64 {
        self.start + self.bytes as u64
    }
}

fn check_names(stored: &[Stored]) -> Result<(), GgufError> {
    let mut seen = BTreeSet::new();
    match stored.iter().find(|tensor| !seen.insert(&tensor.name)) {
        Some(tensor) => Err(GgufError::DuplicateTensor { name: tensor.name.clone() }),
        None => Ok(()),
    }
}

fn check_overlap(stored: &[Stored]) -> Result<(), GgufError> {
    let mut sorted: Vec<&Stored> = stored.iter().collect();
    sorted.sort_by_key(|tensor| tensor.start);
    for pair in sorted.windows(2) {
        if pair[1].start < pair[0].end() {
            return Err(GgufError::Overlap {
                name: pair[1].name.clone(),
                actual: pair[1].start,
                before: pair[0].name.clone(),
                end: pair[0].end(),
            });
        }
    }
    Ok(())
}
