//! The records of a run, and a log of them in a file while the run goes on: a run that ends early
//! loses nothing.

use std::ffi::OsString;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::console::say;
use crate::interrupt::{LeftFile, LeftKind};
use crate::record::{Record, write_json};

/// The records of a run.
pub(crate) struct RecordLog {
    all: Vec<Record>,
    target: Option<PathBuf>,
    log: LogFile,
}

/// The file beside the one that the records will go to, a record a line.
enum LogFile {
    /// No record has come yet. The log will be beside this file; the log of an earlier run stays
    /// until then.
    Waits(PathBuf),
    Open(Partial),
    /// Its last record could not be written; the records before it are whole.
    Stopped(Partial),
    /// There is no log: the records go to no file, or to a pipe or device, or the log cannot be
    /// written.
    None,
}

/// The log's file, which no other run writes.
struct Partial {
    path: PathBuf,
    file: File,
    /// Whole records in the file.
    records: usize,
    _left: LeftFile,
}

impl RecordLog {
    /// For a run whose records go to a file, if to any.
    pub(crate) fn begin(target: Option<&Path>) -> Self {
        // Beside a pipe or a device there is no place.
        let log = match target {
            Some(path) if !path.exists() || path.is_file() => LogFile::Waits(path.into()),
            _ => LogFile::None,
        };
        Self { all: Vec::new(), target: target.map(Into::into), log }
    }

    /// Adds a record. A log that cannot be written is told once: the measurement is worth more.
    pub(crate) fn push(&mut self, record: Record) {
        if let Err(error) = self.log.note(&record) {
            say!("records are not kept while the run goes on: {error:#}");
            self.log.stop();
        }
        self.all.push(record);
    }

    /// Writes the file of records, and removes the log. The records come back in any case. Where
    /// the file cannot be written, its error comes back beside them, and the log stays.
    pub(crate) fn finish(mut self) -> (Vec<Record>, anyhow::Result<()>) {
        let saved = match &self.target {
            Some(target) => write_json(target, &self.all),
            None => Ok(()),
        };
        if saved.is_ok()
            && let LogFile::Open(partial) | LogFile::Stopped(partial) =
                std::mem::replace(&mut self.log, LogFile::None)
        {
            partial.remove();
        }
        (std::mem::take(&mut self.all), saved)
    }
}

impl Drop for RecordLog {
    /// Says where the records of a run are that has not finished.
    fn drop(&mut self) {
        if let LogFile::Open(partial) | LogFile::Stopped(partial) = &self.log {
            say!("records so far, which --merge reads: {}", partial.path.display());
        }
    }
}

impl LogFile {
    fn note(&mut self, record: &Record) -> anyhow::Result<()> {
        if let Self::Waits(target) = self {
            *self = Self::Open(Partial::beside(target)?);
        }
        if let Self::Open(partial) = self {
            let mut line = serde_json::to_vec(record)?;
            line.push(b'\n');
            // At once, so that a run that is killed leaves whole lines.
            partial.file.write_all(&line)?;
            partial.records += 1;
        }
        Ok(())
    }

    /// Writes no more. A file without a whole record is removed, such as a full disk leaves.
    fn stop(&mut self) {
        if let Self::Open(partial) = std::mem::replace(self, Self::None) {
            match partial.records {
                0 => partial.remove(),
                _ => *self = Self::Stopped(partial),
            }
        }
    }
}

impl Partial {
    /// `FILE.partial`. Where another run is writing that file, a number stands before the ending.
    fn beside(target: &Path) -> std::io::Result<Self> {
        let mut others = 0;
        loop {
            let path = partial(target, others);
            let file = OpenOptions::new().create(true).write(true).truncate(false).open(&path)?;
            match file.try_lock() {
                // Unless the run that wrote it has just removed it.
                Ok(()) if path.exists() => {
                    file.set_len(0)?;
                    return Ok(Self {
                        _left: LeftFile::new(LeftKind::Records, path.clone()),
                        path,
                        file,
                        records: 0,
                    });
                }
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => others += 1,
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
    }

    fn remove(self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            say!("{} is left behind: {error}", self.path.display());
        }
    }
}

/// `FILE.partial`, `FILE.1.partial`, ...
fn partial(target: &Path, others: usize) -> PathBuf {
    let mut name = OsString::from(target);
    if others > 0 {
        name.push(format!(".{others}"));
    }
    name.push(".partial");
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{metric, read_json};
    use crate::report::test_records::record;

    fn of(value: f64) -> Record {
        record("full", None, metric::TIME_US, value)
    }

    #[test]
    fn a_run_that_ends_early_leaves_what_it_measured() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("records.json");
        let mut records = RecordLog::begin(Some(&target));
        records.push(of(1.0));
        records.push(of(f64::NAN));
        drop(records);
        let left = read_json(&partial(&target, 0)).unwrap();
        assert_eq!(left[0], of(1.0));
        assert!(left.len() == 2 && left[1].value.is_nan());
        assert!(!target.exists());

        // A run that measures nothing leaves it alone.
        drop(RecordLog::begin(Some(&target)));
        assert_eq!(read_json(&partial(&target, 0)).unwrap().len(), 2);
        let mut records = RecordLog::begin(Some(&target));
        records.push(of(3.0));
        let (all, saved) = records.finish();
        saved.unwrap();
        assert_eq!(all, [of(3.0)]);
        assert_eq!(read_json(&target).unwrap(), [of(3.0)]);
        assert!(!partial(&target, 0).exists());
    }

    #[test]
    fn a_journal_that_cannot_be_written_costs_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("records.json");
        std::fs::create_dir(partial(&target, 0)).unwrap();
        let mut records = RecordLog::begin(Some(&target));
        records.push(of(1.0));
        records.push(of(2.0));
        let (all, saved) = records.finish();
        assert!(all.len() == 2 && saved.is_ok());
        assert_eq!(read_json(&target).unwrap().len(), 2);
        let mut records = RecordLog::begin(None);
        records.push(of(1.0));
        assert_eq!(records.finish().0.len(), 1);
    }

    /// A file that is open for reading alone takes no record, as none fits on a full disk.
    #[test]
    fn a_journal_without_a_record_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("records.json");
        let path = partial(&target, 0);
        let begin = |lines: &[Record]| {
            let mut records = RecordLog::begin(Some(&target));
            lines.iter().for_each(|line| records.push(line.clone()));
            if lines.is_empty() {
                records.log = LogFile::Open(Partial::beside(&target).unwrap());
            }
            let LogFile::Open(partial) = &mut records.log else { panic!("no log") };
            partial.file = File::open(&path).unwrap();
            records.push(of(2.0));
            records
        };
        let records = begin(&[]);
        assert!(!path.exists(), "an empty file is left");
        drop(records);

        let records = begin(&[of(1.0)]);
        assert_eq!(read_json(&path).unwrap(), [of(1.0)]);
        let (all, saved) = records.finish();
        saved.unwrap();
        assert_eq!(all, [of(1.0), of(2.0)]);
        assert!(!path.exists(), "the whole file stands in its place");
    }

    #[test]
    fn two_runs_at_once_keep_their_records_apart() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("records.json");
        let [mut one, mut other] = [(); 2].map(|()| RecordLog::begin(Some(&target)));
        for at in 0..3 {
            one.push(of(f64::from(at)));
            other.push(of(10.0 + f64::from(at)));
        }
        let values = |path: &Path| -> Vec<f64> {
            read_json(path).unwrap().into_iter().map(|record| record.value).collect()
        };
        assert_eq!(values(&partial(&target, 0)), [0.0, 1.0, 2.0]);
        assert_eq!(values(&partial(&target, 1)), [10.0, 11.0, 12.0]);
        one.finish().1.unwrap();
        assert_eq!(values(&target), [0.0, 1.0, 2.0]);
        other.finish().1.unwrap();
        // The last one to finish, whole.
        assert_eq!(values(&target), [10.0, 11.0, 12.0]);
        assert!(!partial(&target, 0).exists() && !partial(&target, 1).exists());
    }

    #[test]
    fn records_that_cannot_be_written_stay_in_the_journal() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("records.json");
        let mut records = RecordLog::begin(Some(&target));
        records.push(of(1.0));
        // No file can take its place.
        std::fs::create_dir(&target).unwrap();
        let (all, saved) = records.finish();
        assert_eq!(all, [of(1.0)]);
        assert!(saved.unwrap_err().to_string().contains("records.json"));
        assert_eq!(read_json(&partial(&target, 0)).unwrap(), [of(1.0)]);
    }
}
