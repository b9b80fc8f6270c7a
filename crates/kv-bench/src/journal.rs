//! What a run has measured so far, kept in a file while it goes on: a run that ends early loses nothing.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::record::{Record, write_json};

/// The records of a run.
pub(crate) struct Records {
    all: Vec<Record>,
    target: Option<PathBuf>,
    journal: Journal,
}

/// The file beside the one that the records will go to, a record a line.
enum Journal {
    /// From the first record on: what an earlier run left stays until there is something better.
    Waits(PathBuf),
    Open(PathBuf, File),
    /// The records go to no file, or to one that is none, or the journal cannot be written.
    None,
}

impl Records {
    /// For a run whose records go to a file, if to any.
    pub(crate) fn begin(target: Option<&Path>) -> Self {
        // Beside a pipe or a device there is no place.
        let journal = match target {
            Some(path) if !path.exists() || path.is_file() => Journal::Waits(partial(path)),
            _ => Journal::None,
        };
        Self { all: Vec::new(), target: target.map(Into::into), journal }
    }

    /// Adds a record. A journal that cannot be written is told once: what was measured is worth more.
    pub(crate) fn push(&mut self, record: Record) {
        if let Err(error) = self.journal.note(&record) {
            eprintln!("records are not kept while the run goes on: {error:#}");
            self.journal = Journal::None;
        }
        self.all.push(record);
    }

    /// Writes the file, and removes the one that stood for it.
    ///
    /// # Errors
    /// If the file cannot be written; the other stays then.
    pub(crate) fn finish(mut self) -> anyhow::Result<Vec<Record>> {
        if let Some(target) = &self.target {
            write_json(target, &self.all)?;
        }
        if let Journal::Open(path, _) = std::mem::replace(&mut self.journal, Journal::None)
            && let Err(error) = std::fs::remove_file(&path)
        {
            eprintln!("{} is left behind: {error}", path.display());
        }
        Ok(std::mem::take(&mut self.all))
    }
}

impl Drop for Records {
    /// Says where the records of a run are that has not finished.
    fn drop(&mut self) {
        if let Journal::Open(path, _) = &self.journal {
            eprintln!("records so far, which --merge reads: {}", path.display());
        }
    }
}

impl Journal {
    fn note(&mut self, record: &Record) -> anyhow::Result<()> {
        if let Self::Waits(path) = self {
            let file = File::create(&*path)?;
            *self = Self::Open(std::mem::take(path), file);
        }
        if let Self::Open(_, file) = self {
            let mut line = serde_json::to_vec(record)?;
            line.push(b'\n');
            // At once, so that a run that is killed leaves whole lines.
            file.write_all(&line)?;
        }
        Ok(())
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

    fn of(value: f64) -> Record {
        record("full", None, metric::TIME_US, value)
    }

    #[test]
    fn a_run_that_ends_early_leaves_what_it_measured() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("records.json");
        let mut records = Records::begin(Some(&target));
        records.push(of(1.0));
        records.push(of(f64::NAN));
        drop(records);
        let left = read_json(&partial(&target)).unwrap();
        assert_eq!(left[0], of(1.0));
        assert!(left.len() == 2 && left[1].value.is_nan());
        assert!(!target.exists());

        // A run that measures nothing leaves it alone.
        drop(Records::begin(Some(&target)));
        assert_eq!(read_json(&partial(&target)).unwrap().len(), 2);
        let mut records = Records::begin(Some(&target));
        records.push(of(3.0));
        assert_eq!(records.finish().unwrap(), [of(3.0)]);
        assert_eq!(read_json(&target).unwrap(), [of(3.0)]);
        assert!(!partial(&target).exists());
    }

    #[test]
    fn a_journal_that_cannot_be_written_costs_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("records.json");
        std::fs::create_dir(partial(&target)).unwrap();
        let mut records = Records::begin(Some(&target));
        records.push(of(1.0));
        records.push(of(2.0));
        assert_eq!(records.finish().unwrap().len(), 2);
        assert_eq!(read_json(&target).unwrap().len(), 2);
        let mut records = Records::begin(None);
        records.push(of(1.0));
        assert_eq!(records.finish().unwrap().len(), 1);
    }
}
