//! How far a suite has come: a bar on a terminal, a line now and then in a log.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::console::say;

/// Time between two lines of a log.
const PAUSE: Duration = Duration::from_secs(15);

/// Work done, on stderr: in steps, or in units that weigh steps of unequal cost.
pub(crate) struct Progress(Output);

enum Output {
    Bar(ProgressBar),
    Log(Log),
}

/// The parts of a log's lines.
struct Log {
    what: String,
    done: usize,
    units: usize,
    started: Instant,
    written: Instant,
}

impl Progress {
    /// Begins `units` units of work.
    pub(crate) fn new(units: usize, what: &str) -> Self {
        if !stderr().is_terminal() {
            let now = Instant::now();
            let log = Log { what: what.into(), done: 0, units, started: now, written: now };
            say!("{}", log.line(Duration::ZERO));
            return Self(Output::Log(log));
        }
        let bar = ProgressBar::new(units as u64);
        let template = "{msg:<28} {wide_bar} {percent:>3} % {elapsed} (left {eta})";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what.to_string());
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(Output::Bar(bar))
    }

    /// One unit is done.
    pub(crate) fn step(&mut self) {
        self.advance(1);
    }

    /// So many units are done.
    pub(crate) fn advance(&mut self, units: usize) {
        match &mut self.0 {
            Output::Bar(bar) => bar.inc(units as u64),
            Output::Log(log) => {
                log.done += units;
                if log.written.elapsed() >= PAUSE {
                    log.written = Instant::now();
                    say!("{}", log.line(log.started.elapsed()));
                }
            }
        }
    }

    /// All of it is done.
    pub(crate) fn finish(self) {
        if let Output::Bar(bar) = self.0 {
            bar.finish_and_clear();
        }
    }
}

impl Log {
    fn line(&self, elapsed: Duration) -> String {
        let Self { what, done, units, .. } = self;
        let seconds = elapsed.as_secs_f64();
        if *done == 0 {
            return format!("{what}: 0 %");
        }
        let share = *done as f64 / *units as f64;
        let left = seconds * (1.0 / share - 1.0);
        let percent = 100.0 * share;
        format!("{what}: {percent:.0} % after {seconds:.0} s, about {left:.0} s left")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_how_much_is_left() {
        let now = Instant::now();
        let mut log =
            Log { what: "retrieval".into(), done: 0, units: 40, started: now, written: now };
        assert_eq!(log.line(Duration::ZERO), "retrieval: 0 %");
        log.done = 10;
        let line = log.line(Duration::from_secs(30));
        assert_eq!(line, "retrieval: 25 % after 30 s, about 90 s left");
    }
}
