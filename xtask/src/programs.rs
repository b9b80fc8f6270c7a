//! Runs test executables, several at a time.
//!
//! A GPU's driver compiles kernels on one thread of a process. Software drivers need seconds for a
//! kernel, so one executable keeps one core busy, and the tests of a workspace take as long as all
//! kernels together. Several executables keep several cores busy.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::report::Counts;
use crate::util::{self, Executable};

/// The most executables that run at once. Each has threads for every core besides.
const MOST_AT_ONCE: usize = 4;

/// How test executables run.
pub(crate) struct Settings {
    /// Variables that executables have besides this process's own.
    pub(crate) variables: Vec<(String, String)>,
    /// Whether executables run one after the other.
    pub(crate) alone: bool,
}

/// What came of all executables.
#[derive(Default)]
pub(crate) struct Outcome {
    pub(crate) counts: Counts,
    /// Executables that ended without counting a failed test.
    pub(crate) broken: Vec<String>,
}

/// Runs test executables to their ends. Each line of their output begins with the crate's name.
///
/// # Errors
/// When an executable cannot be started or read.
pub(crate) fn run(executables: Vec<Executable>, settings: &Settings) -> Result<Outcome> {
    let mut tests = Vec::new();
    for executable in executables.into_iter().filter(|executable| executable.tests) {
        tests.push((count(&executable)?, executable));
    }
    // The longest first, so that none is left to run alone in the end.
    tests.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let at_once = if settings.alone { 1 } else { cores.min(MOST_AT_ONCE) };
    let waiting: VecDeque<Executable> = tests.into_iter().map(|(_, test)| test).collect();
    let waiting = Mutex::new(waiting);
    let outcome = Mutex::new(Outcome::default());
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let work = || -> Result<()> {
        while let Some(executable) = next() {
            let (counts, status) = run_one(&executable, settings)?;
            let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
            if !status.success() && counts.failed == 0 {
                // It crashed before it could count.
                let path = executable.path.display();
                outcome.broken.push(format!("{path} ended with {status}"));
            }
            outcome.counts.add(&counts);
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        let panicked = || anyhow::anyhow!("a thread that ran tests panicked");
        let ended = workers.into_iter().map(|worker| worker.join().map_err(|_| panicked())?);
        ended.collect::<Result<()>>()
    })?;
    Ok(outcome.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Runs the examples in documentation, which cargo builds and runs itself.
///
/// # Errors
/// When cargo cannot be started or read.
pub(crate) fn run_doc_tests(features: &str, settings: &Settings) -> Result<Outcome> {
    let line = format!("test --release --workspace --no-fail-fast --doc --features={features}");
    let mut cargo = util::cargo(&line);
    cargo.envs(settings.variables.iter().cloned());
    let (counts, status) = pass_on(&mut cargo, "docs")?;
    let mut outcome = Outcome::default();
    if !status.success() && counts.failed == 0 {
        outcome.broken.push(format!("cargo test --doc ended with {status}"));
    }
    outcome.counts = counts;
    Ok(outcome)
}

/// The number of tests of an executable.
fn count(executable: &Executable) -> Result<usize> {
    let mut command = Command::new(&executable.path);
    let listed = util::output(command.args(["--list", "--format=terse"]))?;
    Ok(listed.lines().filter(|line| line.ends_with(": test")).count())
}

/// Runs an executable in its package's folder, as cargo does.
fn run_one(executable: &Executable, settings: &Settings) -> Result<(Counts, ExitStatus)> {
    let name = executable.package.file_name().unwrap_or_default().to_string_lossy();
    let mut command = Command::new(&executable.path);
    command.current_dir(&executable.package).env("CARGO_MANIFEST_DIR", &executable.package);
    command.envs(settings.variables.iter().cloned());
    let start = Instant::now();
    let ended = pass_on(&mut command, &name)?;
    println!("{name}: {}: {:.1} s", executable.path.display(), start.elapsed().as_secs_f32());
    Ok(ended)
}

/// Runs a command, passes its output on line by line, and sums the results in it.
fn pass_on(command: &mut Command, name: &str) -> Result<(Counts, ExitStatus)> {
    let started = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn();
    let mut child =
        started.with_context(|| format!("cannot run {}", command.get_program().display()))?;
    let mut counts = Counts::default();
    if let Some(stdout) = child.stdout.take() {
        let mut stdout = BufReader::new(stdout);
        let mut line = Vec::new();
        // Bytes, not strings: a test may print anything.
        while stdout.read_until(b'\n', &mut line)? > 0 {
            let mut out = std::io::stdout().lock();
            write!(out, "{name}: ")?;
            out.write_all(&line)?;
            counts.add_line(&String::from_utf8_lossy(&line));
            line.clear();
        }
    }
    Ok((counts, child.wait()?))
}
