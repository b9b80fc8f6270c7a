//! One safetensors file: its header in memory, its data where it is.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Metadata, TensorInfo};

use crate::error::{ModelError, Result, WeightsError};

/// As the safetensors format limits it.
const MAX_HEADER: u64 = 100_000_000;

#[derive(Debug)]
pub(super) struct SafetensorsFile {
    /// Where the file is; only a name for messages where there are `bytes`.
    path: PathBuf,
    /// The whole file, if it is in memory.
    bytes: Option<&'static [u8]>,
    metadata: Metadata,
    /// Where the data starts.
    start: u64,
}

impl SafetensorsFile {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let io = |source| ModelError::io(path, source);
        let mut file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let (metadata, start) = header(&mut file, length, path)?;
        Ok(Self { path: path.into(), bytes: None, metadata, start })
    }

    pub(super) fn from_bytes(bytes: &'static [u8]) -> Result<Self> {
        let path = PathBuf::from("<embedded>");
        let (metadata, start) = header(&mut { bytes }, bytes.len() as u64, &path)?;
        Ok(Self { path, bytes: Some(bytes), metadata, start })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        self.metadata.offset_keys().into_iter()
    }

    pub(super) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.metadata.info(name)
    }

    /// The bytes of one tensor.
    pub(super) fn read(&self, info: &TensorInfo) -> Result<Box<dyn Read>> {
        let (from, to) = info.data_offsets;
        let (start, length) = (self.start + from as u64, (to - from) as u64);
        if let Some(bytes) = self.bytes {
            let mut bytes = std::io::Cursor::new(bytes);
            bytes.set_position(start);
            return Ok(Box::new(bytes.take(length)));
        }
        let io = |source| ModelError::io(&self.path, source);
        let mut file = File::open(&self.path).map_err(io)?;
        file.seek(SeekFrom::Start(start)).map_err(io)?;
        Ok(Box::new(file.take(length)))
    }
}

/// The header, checked against the file's length, and where the data starts.
fn header(file: &mut dyn Read, length: u64, path: &Path) -> Result<(Metadata, u64)> {
    let invalid = |reason: String| WeightsError::Invalid { path: path.into(), reason };
    let truncated =
        |expected| WeightsError::Truncated { path: path.into(), expected, actual: length };
    let io = |source| ModelError::io(path, source);

    let mut size = [0; 8];
    if length < size.len() as u64 {
        return Err(truncated(size.len() as u64).into());
    }
    file.read_exact(&mut size).map_err(io)?;
    let size = u64::from_le_bytes(size);
    if size > MAX_HEADER {
        let reason =
            format!("a header of {size} bytes is announced, at most {MAX_HEADER} expected");
        return Err(invalid(reason).into());
    }
    let start = 8 + size;
    if start > length {
        return Err(truncated(start).into());
    }
    let mut header = Vec::new();
    file.take(size).read_to_end(&mut header).map_err(io)?;
    let metadata: Metadata =
        serde_json::from_slice(&header).map_err(|error| invalid(format!("its header: {error}")))?;
    let expected = start.saturating_add(metadata.data_len() as u64);
    match length.cmp(&expected) {
        std::cmp::Ordering::Less => Err(truncated(expected).into()),
        std::cmp::Ordering::Equal => Ok((metadata, start)),
        std::cmp::Ordering::Greater => {
            Err(invalid(format!("{} bytes follow its last tensor", length - expected)).into())
        }
    }
}
