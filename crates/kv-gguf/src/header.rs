//! The first 24 bytes: magic number, version, and the numbers of tensors and of metadata.

use std::io::{ErrorKind, Read};
use std::path::Path;

use crate::GgufError;

/// Version 2 has the layout of version 3 in little-endian files. Version 1 has shorter counts.
const VERSIONS: &[u32] = &[2, 3];
const LENGTH: u64 = 24;
/// The shortest metadata entry: a key of one letter, the number of its type, one byte of value.
const SHORTEST_ENTRY: u64 = 8 + 1 + 4 + 1;
/// The shortest description of a tensor: a name of one letter and one dimension.
const SHORTEST_TENSOR: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// The counts of the header.
pub(crate) struct Header {
    pub(crate) tensors: u64,
    pub(crate) entries: u64,
}

impl Header {
    /// Reads the header of a file of `length` bytes.
    pub(crate) fn read(
        reader: &mut impl Read,
        path: &Path,
        length: u64,
    ) -> Result<Self, GgufError> {
        let mut part = [0; LENGTH as usize];
        reader.read_exact(&mut part).map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => GgufError::Truncated { part: "header", length },
            _ => GgufError::io(path, source),
        })?;
        Self::parse(&part, length)
    }

    fn parse(bytes: &[u8; LENGTH as usize], length: u64) -> Result<Self, GgufError> {
        let [m0, m1, m2, m3, v0, v1, v2, v3, counts @ ..] = *bytes;
        let (magic, version) = ([m0, m1, m2, m3], [v0, v1, v2, v3]);
        if magic != *b"GGUF" {
            return Err(GgufError::Magic { actual: magic });
        }
        let (little, big) = (u32::from_le_bytes(version), u32::from_be_bytes(version));
        match little {
            _ if VERSIONS.contains(&little) => {}
            _ if VERSIONS.contains(&big) => return Err(GgufError::ByteOrder { version: big }),
            actual => return Err(GgufError::Version { actual, supported: VERSIONS }),
        }
        let counts = u128::from_le_bytes(counts);
        let (tensors, entries) = (counts as u64, (counts >> 64) as u64);
        let room = length.saturating_sub(LENGTH);
        check("entries of metadata", entries, room / SHORTEST_ENTRY)?;
        check("tensors", tensors, room / SHORTEST_TENSOR)?;
        Ok(Self { tensors, entries })
    }
}

fn check(what: &'static str, actual: u64, most: u64) -> Result<(), GgufError> {
    if actual > most { Err(GgufError::Count { what, actual, most }) } else { Ok(()) }
}
