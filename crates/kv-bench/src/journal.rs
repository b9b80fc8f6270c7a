//! What a run has measured so far, kept in a file while it goes on: a run that ends early loses nothing.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::record::{Record, write_json};

/// The records of a run.
pub(crate) struct Records {
    all: Vec<Record>,
    journal: Option<Journal>,
}

/// The file beside the one that the records will go to, a record a line.
struct Journal {
    target: PathBuf,
    path: PathBuf,
    file: File,
}

impl Records {
    /// For a run whose records go to a file, if to any. What an earlier run left beside it is lost.
    ///
    /// # Errors
    /// If nothing can be written there.
    pub(crate) fn begin(target: Option<&Path>) -> anyhow::Result<Self> {
        let open = |target: &Path| {
            let path = partial(target);
            let file = File::create(&path)
                .with_context(|| format!("cannot write to {}", path.display()))?;
            anyhow::Ok(Journal { target: target.into(), path, file })
        };
        Ok(Self { all: Vec::new(), journal: target.map(open).transpose()? })
    }

    /// Adds a record. A file that cannot be written is told once and not tried again: what was measured is worth more.
    pub(crate) fn push(&mut self, record: Record) {
        if let Some(journal) = &mut self.journal
            && let Err(error) = journal.note(&record)
        {
            eprintln!("records so far are not kept in {}: {error}", journal.path.display());
            self.journal = None;
        }
        self.all.push(record);
    }

    /// Writes the file, and removes the one that stood for it.
    ///
    /// # Errors
    /// If the file cannot be written; the other stays then.
    pub(crate) fn finish(mut self) -> anyhow::Result<Vec<Record>> {
        if let Some(journal) = &self.journal {
            write_json(&journal.target, &self.all)?;
        }
        if let Some(Journal { path, .. }) = self.journal.take() {
            std::fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        }
        Ok(std::mem::take(&mut self.all))
    }
}

impl Drop for Records {
    /// Says where the records of a run are that has not finished.
    fn drop(&mut self) {
        let Some(Journal { path, .. }) = self.journal.take() else { return };
        if self.all.is_empty() {
            let _ = std::fs::remove_file(path);
        } else {
            eprintln!("records so far, which --merge reads: {}", path.display());
        }
    }
}

impl Journal {
    fn note(&mut self, record: &Record) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        // At once, so that a run that is killed leaves whole lines.
        Ok(self.file.write_all(&line)?)
    }
}

/// `FILE.partial`
fn partial(target: &Path) -> PathBuf {
    let mut name = OsString::from(target);
    name.push(".partial");
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{metric, read_json};
    use crate::report::sample::record;

    #[test]
    fn a_run_that_ends_early_leaves_what_it_measured() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("records.json");
        let of = |value| record("full", None, metric::TIME_US, value);
        let mut records = Records::begin(Some(&target)).unwrap();
        records.push(of(1.0));
        records.push(of(f64::NAN));
        drop(records);
        let left = read_json(&partial(&target)).unwrap();
        assert_eq!(left[0], of(1.0));
        assert!(left.len() == 2 && left[1].value.is_nan());
        assert!(!target.exists());

        drop(Records::begin(Some(&target)).unwrap());
        assert!(!partial(&target).exists());
        let mut records = Records::begin(Some(&target)).unwrap();
        records.push(of(3.0));
        assert_eq!(records.finish().unwrap(), [of(3.0)]);
        assert_eq!(read_json(&target).unwrap(), [of(3.0)]);
        assert!(!partial(&target).exists());
    }

    #[test]
    fn a_folder_that_is_not_there_is_told_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let error = Records::begin(Some(&folder.path().join("no/records.json"))).err().unwrap();
        assert!(error.to_string().starts_with("cannot write to"), "{error}");
        let mut records = Records::begin(None).unwrap();
        records.push(record("full", None, metric::TIME_US, 1.0));
        assert_eq!(records.finish().unwrap().len(), 1);
    }
}
