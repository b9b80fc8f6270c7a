//! The message of an interrupted run, which names the files that it leaves.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Files to which records are being written. Each can be read after every whole record.
static OPEN: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A file of records that an interrupt would leave.
#[derive(Debug)]
pub(crate) struct LeftFile(PathBuf);

impl LeftFile {
    /// From now on.
    pub(crate) fn new(path: PathBuf) -> Self {
        open().push(path.clone());
        Self(path)
    }
}

impl Drop for LeftFile {
    fn drop(&mut self) {
        open().retain(|path| *path != self.0);
    }
}

fn open() -> MutexGuard<'static, Vec<PathBuf>> {
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
fn sentence(left: &[PathBuf]) -> String {
    if left.is_empty() {
        return "no records are left: --json FILE keeps them from the first one measured on".into();
    }
    let names: Vec<_> = left.iter().map(|path| path.display().to_string()).collect();
    format!("records so far, which --merge reads: {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_named() {
        assert!(sentence(&[]).contains("--json"));
        assert!(sentence(&["a.json.partial".into()]).ends_with("--merge reads: a.json.partial"));
        let path = PathBuf::from("of-this-test.partial");
        let left = LeftFile::new(path.clone());
        assert!(open().contains(&path));
        drop(left);
        assert!(!open().contains(&path));
    }
}
