//! The message of an interrupted run, which names the files that it leaves.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Files that are being written. Each can be read after every whole line.
static OPEN: Mutex<Vec<(LeftKind, PathBuf)>> = Mutex::new(Vec::new());

/// The contents of a file that an interrupt would leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeftKind {
    /// Records, for `--merge`.
    Records,
    /// Answers of `evaluate`, from which the command goes on.
    Answers,
}

/// A file that an interrupt would leave.
#[derive(Debug)]
pub(crate) struct LeftFile(LeftKind, PathBuf);

impl LeftFile {
    /// From now on.
    pub(crate) fn new(kind: LeftKind, path: PathBuf) -> Self {
        open().push((kind, path.clone()));
        Self(kind, path)
    }
}

impl Drop for LeftFile {
    fn drop(&mut self) {
        open().retain(|(kind, path)| (kind, path) != (&self.0, &self.1));
    }
}

fn open() -> MutexGuard<'static, Vec<(LeftKind, PathBuf)>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the program at the next interrupt (Ctrl-C, or a request to end), with a line that names the
/// files that stay. On systems other than Unix, an interrupt ends the program without a line.
///
/// # Errors
/// Where the system takes no handler.
#[cfg(unix)]
pub(crate) fn tell() -> anyhow::Result<()> {
    use anyhow::Context;
    use signal_hook::consts::{SIGINT, SIGTERM};
    use signal_hook::iterator::Signals;

    let mut signals = Signals::new([SIGINT, SIGTERM]).context("handling interrupts")?;
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            let left = open();
            crate::console::say!("\ninterrupted: {}", sentence(&left));
            // As shells have it of programs that a signal ended. At once: handlers of a process's
            // end would take the device from threads that still use it.
            signal_hook::low_level::exit(128 + signal);
        }
    });
    Ok(())
}

#[cfg(not(unix))]
pub(crate) fn tell() -> anyhow::Result<()> {
    Ok(())
}

#[cfg(any(unix, test))]
fn sentence(left: &[(LeftKind, PathBuf)]) -> String {
    if left.is_empty() {
        return "no records are left: --json FILE keeps them from the first one measured on".into();
    }
    let kinds = [
        (LeftKind::Answers, "answers so far, from which this command goes on"),
        (LeftKind::Records, "records so far, which --merge reads"),
    ];
    let told = kinds.into_iter().filter_map(|(kind, words)| {
        let own = left.iter().filter(|(own, _)| *own == kind);
        let names: Vec<String> = own.map(|(_, path)| path.display().to_string()).collect();
        (!names.is_empty()).then(|| format!("{words}: {}", names.join(", ")))
    });
    told.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_named() {
        assert!(sentence(&[]).contains("--json"));
        let records = (LeftKind::Records, PathBuf::from("a.json.partial"));
        let answers = (LeftKind::Answers, PathBuf::from("b.jsonl"));
        assert!(
            sentence(std::slice::from_ref(&records)).ends_with("--merge reads: a.json.partial")
        );
        assert_eq!(
            sentence(&[records, answers]),
            "answers so far, from which this command goes on: b.jsonl; records so far, which \
             --merge reads: a.json.partial"
        );
        let own = (LeftKind::Records, PathBuf::from("of-this-test.partial"));
        let left = LeftFile::new(own.0, own.1.clone());
        assert!(open().contains(&own));
        drop(left);
        assert!(!open().contains(&own));
    }
}
