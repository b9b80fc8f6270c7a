//! Files that are never half written: a new file is written beside the old file, and then renamed.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Result, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use tempfile::NamedTempFile;

/// Writes a file by `write`. An old file stays until the new file is whole on the disk. A pipe or a
/// device is written directly.
///
/// # Errors
/// If the file cannot be written. The old file stays as it was.
pub(crate) fn replace(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    if path.exists() && !path.is_file() {
        return write_to(OpenOptions::new().write(true).open(path)?, write);
    }
    // A link stays one.
    let target = path.canonicalize().unwrap_or_else(|_| path.into());
    let beside = beside(&target)?;
    if let Ok(old) = std::fs::metadata(&target) {
        beside.as_file().set_permissions(old.permissions())?;
    }
    write_to(beside.as_file(), write)?;
    // Some file systems tell only now that they are full.
    beside.as_file().sync_all()?;
    beside.persist(&target).map(drop).map_err(|failed| failed.error)
}

fn write_to(file: impl Write, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let mut file = BufWriter::new(file);
    write(&mut file)?;
    file.flush()
}

/// A new file in a path's folder, whose name no other run takes. It is removed where it is not
/// renamed.
fn beside(path: &Path) -> Result<NamedTempFile> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_path_buf(),
        _ => PathBuf::from("."),
    };
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let prefix = format!(".{name}.");
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(".tmp");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As other new files; the user's mask takes its part of these bits.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder)
}

/// Checks that a file can be written, and leaves an existing file as it is.
///
/// # Errors
/// If it cannot.
pub(crate) fn check_writable(path: &Path) -> anyhow::Result<()> {
    let context = || format!("cannot write to {}", path.display());
    if path.exists() {
        OpenOptions::new().append(true).open(path).map(|_: File| ()).with_context(context)?;
        if !path.is_file() {
            return Ok(());
        }
    }
    path.file_name().with_context(context)?;
    beside(path).map(drop).with_context(context)
}

#[cfg(test)]
mod tests {
    use std::io::Error;

    use super::*;

    #[test]
    fn files_are_checked_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        check_writable(&path).unwrap();
        assert!(!path.exists());
        std::fs::write(&path, "earlier").unwrap();
        check_writable(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "earlier");
        let error = check_writable(&folder.path().join("no/records.json")).unwrap_err();
        assert!(error.to_string().starts_with("cannot write to"), "{error}");
        assert!(check_writable(folder.path()).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left behind");
    }

    #[test]
    fn a_file_stays_until_another_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        replace(&path, |file| file.write_all(b"old")).unwrap();
        let failed = replace(&path, |file| {
            file.write_all(&[b'x'; 100_000])?;
            Err(Error::other("the disk is full"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "the disk is full");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
        replace(&path, |file| file.write_all(b"new")).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left behind");
    }

    #[cfg(unix)]
    #[test]
    fn links_devices_and_permissions_stay() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("own"), folder.path().join("link"));
        std::fs::write(&path, "old").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        symlink(&path, &link).unwrap();
        replace(&link, |file| file.write_all(b"new")).unwrap();
        assert!(link.is_symlink());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        replace(Path::new("/dev/null"), |file| file.write_all(b"gone")).unwrap();
        assert!(!Path::new("/dev/null").is_file());
    }
}
