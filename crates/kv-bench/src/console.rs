//! Lines for people. A run goes on where nobody reads its progress. Where its tables cannot be
//! printed, the run ends with an error.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write, stderr, stdout};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;

/// Writes a line to stderr, as `eprintln!` does, which would panic where nobody reads it.
macro_rules! say {
    ($($line:tt)*) => { $crate::console::say_line(format_args!($($line)*)) };
}
pub(crate) use say;

/// Whether [`say!`] says nothing.
static IS_SILENT: AtomicBool = AtomicBool::new(false);

/// Says nothing from now on: another process says the lines of this one.
pub(crate) fn silence() {
    IS_SILENT.store(true, Ordering::Relaxed);
}

/// The function behind [`say!`].
pub(crate) fn say_line(line: Arguments<'_>) {
    if IS_SILENT.load(Ordering::Relaxed) {
        return;
    }
    // There is no other place to tell that this one is closed or full.
    let _ = writeln!(stderr().lock(), "{line}");
}

/// Prints a text on stdout. A reader that has gone away has read enough.
///
/// # Errors
/// Where stdout takes no more, as a file on a full disk.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        printed => printed.context("printing on standard output"),
    }
}

/// An error and its causes, as one line. Some errors already tell their cause, which is not told
/// again.
pub(crate) fn causes(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    #[test]
    fn causes_are_told_once() {
        let told = Err::<(), _>(anyhow!("full")).context("cannot write a: full").unwrap_err();
        assert_eq!(super::causes(&told), "cannot write a: full");
        let untold = told.context("no answers");
        assert_eq!(super::causes(&untold), "no answers: cannot write a: full");
    }
}
