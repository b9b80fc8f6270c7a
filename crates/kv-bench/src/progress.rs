//! How far a suite has come: a bar on a terminal, a line now and then in a log.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Time between two lines of a log.
const PAUSE: Duration = Duration::from_secs(15);

/// Steps done, on stderr.
pub(crate) struct Progress(Output);

enum Output {
    Bar(ProgressBar),
    Log(Log),
}

/// What the lines of a log are made of.
struct Log {
    what: String,
    done: usize,
    steps: usize,
    started: Instant,
    written: Instant,
}

impl Progress {
    /// Begins `steps` steps.
    pub(crate) fn new(steps: usize, what: &str) -> Self {
        if !stderr().is_terminal() {
            let now = Instant::now();
            let log = Log { what: what.into(), done: 0, steps, started: now, written: now };
            eprintln!("{}", log.line(Duration::ZERO));
            return Self(Output::Log(log));
        }
        let bar = ProgressBar::new(steps as u64);
        let template = "{msg:<28} {wide_bar} {pos}/{len} {elapsed} (left {eta})";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what.to_string());
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(Output::Bar(bar))
    }

    /// One step is done.
    pub(crate) fn step(&mut self) {
        match &mut self.0 {
            Output::Bar(bar) => bar.inc(1),
            Output::Log(log) => {
                log.done += 1;
                if log.written.elapsed() >= PAUSE {
                    log.written = Instant::now();
                    eprintln!("{}", log.line(log.started.elapsed()));
                }
            }
        }
    }

    /// All steps are done.
    pub(crate) fn finish(self) {
        if let Output::Bar(bar) = self.0 {
            bar.finish_and_clear();
        }
    }
}

impl Log {
    fn line(&self, elapsed: Duration) -> String {
        let Self { what, done, steps, .. } = self;
        let seconds = elapsed.as_secs_f64();
        match done {
            0 => format!("{what}: 0/{steps}"),
            _ => {
                let left = seconds * (steps - done) as f64 / *done as f64;
                format!("{what}: {done}/{steps} after {seconds:.0} s, about {left:.0} s left")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_how_much_is_left() {
        let now = Instant::now();
        let mut log =
            Log { what: "retrieval".into(), done: 0, steps: 40, started: now, written: now };
        assert_eq!(log.line(Duration::ZERO), "retrieval: 0/40");
        log.done = 10;
        let line = log.line(Duration::from_secs(30));
        assert_eq!(line, "retrieval: 10/40 after 30 s, about 90 s left");
    }
}
