//! Threads that copy between host and device, one a direction, so that each has a stream of the
//! device to itself.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread;

type Job = Box<dyn FnOnce() + Send>;

/// Which way copies go.
#[derive(Debug, Clone, Copy)]
pub(super) enum Direction {
    ToHost,
    ToDevice,
}

/// The result of a copy, once its thread has made it.
#[derive(Debug)]
pub(super) struct Coming<T>(Arc<OnceLock<Result<T, String>>>);

impl<T> Clone for Coming<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Send + Sync + 'static> Coming<T> {
    /// Begins `work` on a direction's thread, behind that thread's earlier work.
    pub(super) fn start(
        direction: Direction,
        work: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Self {
        let promised = Arc::new(OnceLock::new());
        let kept = promised.clone();
        let job = move || {
            let _work = kv_kernels::awaited_device_work();
            let made = catch_unwind(AssertUnwindSafe(work));
            let _ = kept.set(made.unwrap_or_else(|_| Err("the copying thread panicked".into())));
        };
        if let Err(lost) = copier(direction).send(Box::new(job)) {
            // This thread does the work of a thread that has ended.
            lost.0();
        }
        Self(promised)
    }

    /// Waits for the result of the copy.
    pub(super) fn wait(&self) -> Result<&T, String> {
        self.0.wait().as_ref().map_err(Clone::clone)
    }
}

/// A direction's thread, which lives as long as the process.
fn copier(direction: Direction) -> &'static Sender<Job> {
    static COPIERS: [OnceLock<Sender<Job>>; 2] = [const { OnceLock::new() }; 2];
    COPIERS[direction as usize].get_or_init(|| {
        let (sender, jobs) = channel::<Job>();
        let run = move || jobs.into_iter().for_each(|job| job());
        let _ = thread::Builder::new().name("kv-archive".into()).spawn(run);
        sender
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_panics_is_an_error_and_the_next_goes_on() {
        let lost = Coming::<u8>::start(Direction::ToHost, || panic!("on purpose"));
        let next = Coming::start(Direction::ToHost, || Ok(7u8));
        assert!(lost.wait().unwrap_err().contains("panicked"));
        assert_eq!(next.wait(), Ok(&7));
    }

    /// One direction may wait for the other.
    #[test]
    fn copies_wait_for_what_they_copy() {
        let first = Coming::start(Direction::ToHost, || {
            thread::sleep(std::time::Duration::from_millis(20));
            Ok(3u32)
        });
        let held = first.clone();
        let second = Coming::start(Direction::ToDevice, move || Ok(*held.wait()? + 1));
        assert_eq!(second.wait(), Ok(&4));
    }
}
