//! Files in ZIP archives.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use zip::ZipArchive;

use crate::{Place, TaskError};

/// DEFLATE makes no more than 1032 bytes of one.
const MOST_FROM_A_BYTE: u64 = 1032;

/// The bytes of a file in an archive. The archive's claim of their number is an upper bound of
/// what is read, and has to be possible for an archive of its length.
pub(super) fn member(path: &Path, file: File, member: &str) -> Result<Vec<u8>, TaskError> {
    let fault =
        |reason: String| TaskError::Malformed { place: Place::file(path), format: "ZIP", reason };
    let length = file.metadata().map_err(|error| TaskError::io(path, error))?.len();
    let mut archive =
        ZipArchive::new(BufReader::new(file)).map_err(|error| fault(error.to_string()))?;
    let member = archive.by_name(member).map_err(|error| fault(format!("{member}: {error}")))?;
    let claimed = member.size();
    if claimed / MOST_FROM_A_BYTE > length {
        return Err(fault(format!("a file of {claimed} bytes cannot be in {length} bytes")));
    }
    let mut bytes = Vec::new();
    let read = member.take(claimed.saturating_add(1)).read_to_end(&mut bytes);
    read.map_err(|error| fault(error.to_string()))?;
    if bytes.len() as u64 > claimed {
        return Err(fault(format!("a file is longer than the {claimed} bytes it claims")));
    }
    Ok(bytes)
}
