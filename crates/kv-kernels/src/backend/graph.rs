//! Records the kernels of a step once and replays them as one launch: as a CUDA graph, or as the
//! counterpart of the device's runtime.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use burn::backend::{Backend, BackendTypes, Dispatch};
use burn::tensor::Device;

use crate::KernelError;

const OP: &str = "graph";

/// The work under way on all devices.
static WORK: Mutex<Work> = Mutex::new(Work { threads: 0, waiting: 0, recorded: false });
/// Wakes threads that wait for [`WORK`] to change.
static CHANGED: Condvar = Condvar::new();

/// A lock that recordings hold alone and other work shares. A waiting recording goes before later
/// work.
#[derive(Debug)]
struct Work {
    /// Threads that have announced work.
    threads: usize,
    /// Recordings that wait for these threads.
    waiting: usize,
    /// Whether a recording is under way.
    recorded: bool,
}

impl Work {
    fn lock() -> MutexGuard<'static, Self> {
        WORK.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while `waits` holds, then changes the work.
    fn change(waits: impl Fn(&Work) -> bool, change: impl FnOnce(&mut Work)) {
        let wait = CHANGED.wait_while(Self::lock(), |work| waits(work));
        change(&mut wait.unwrap_or_else(PoisonError::into_inner));
        CHANGED.notify_all();
    }
}

thread_local! {
    /// How many times this thread has announced work that has not ended.
    static ANNOUNCED: Cell<usize> = const { Cell::new(0) };
    /// Whether this thread records.
    static RECORDS: Cell<bool> = const { Cell::new(false) };
}

/// Work on a device: while it lives, no other thread records. See [`device_work`].
#[must_use = "it is work only while it lives"]
#[derive(Debug)]
pub struct DeviceWork {
    /// Makes the type `!Send`: work belongs to its thread.
    _own: PhantomData<*const ()>,
}

/// Announces work on a device, and waits while another thread records: during a recording CUDA
/// refuses allocations and reads, and a refusal destroys the recording. Model sessions and cache
/// reads announce their work themselves. Other code should, if another thread may record on its
/// device.
pub fn device_work() -> DeviceWork {
    announce(|work| work.recorded || work.waiting > 0)
}

/// [`device_work`] for a thread on which other threads with announced work wait, such as a thread
/// that copies for them. It does not wait for a recording that has not begun: that recording waits
/// for the other threads, and they wait for this one.
pub fn awaited_device_work() -> DeviceWork {
    announce(|work| work.recorded)
}

fn announce(waits: impl Fn(&Work) -> bool) -> DeviceWork {
    if !RECORDS.get() {
        if ANNOUNCED.get() == 0 {
            Work::change(waits, |work| work.threads += 1);
        }
        ANNOUNCED.set(ANNOUNCED.get() + 1);
    }
    DeviceWork { _own: PhantomData }
}

impl Drop for DeviceWork {
    fn drop(&mut self) {
        if !RECORDS.get() {
            let left = ANNOUNCED.get().saturating_sub(1);
            ANNOUNCED.set(left);
            if left == 0 {
                Work::change(|_| false, |work| work.threads -= 1);
            }
        }
    }
}

/// A recording under way. The step must run once as a warm-up between [`Self::begin`] and
/// [`Self::record`], on this thread, with nothing else between them: the recording gets only the
/// memory that the warm-up left in the device's pools. Threads that announce their work
/// ([`device_work`]) wait until the recording ends.
#[derive(Debug)]
pub struct Recording {
    device: Device,
    open: bool,
    _alone: Alone,
}

/// The exclusive hold of one recording.
#[derive(Debug)]
struct Alone {
    /// Makes the type `!Send`: a recording belongs to its thread.
    _own: PhantomData<*const ()>,
}

impl Alone {
    /// Begins as soon as all announced work has ended.
    fn begin() -> Self {
        Work::change(|_| false, |work| work.waiting += 1);
        let busy = |work: &Work| work.threads > 0 || work.recorded;
        Work::change(busy, |work| {
            work.waiting -= 1;
            work.recorded = true;
        });
        Self { _own: PhantomData }
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        Work::change(|_| false, |work| work.recorded = false);
    }
}

/// A recorded step.
#[derive(Debug)]
pub struct StepGraph {
    device: Device,
    thread: ThreadId,
    graph: <Dispatch as BackendTypes>::GraphPrimitive,
}

impl Recording {
    /// Begins as soon as the announced work of other threads has ended. `None` on devices that
    /// cannot record, and while this thread records or has announced work.
    pub fn begin(device: &Device) -> Option<Self> {
        let records = match device.as_dispatch() {
            #[cfg(feature = "gpu")]
            burn::backend::DispatchDevice::Cube(_) => true,
            #[allow(unreachable_patterns)]
            _ => false,
        };
        if !records || RECORDS.get() || ANNOUNCED.get() > 0 {
            return None;
        }
        let alone = Alone::begin();
        Dispatch::graph_prepare(device.as_dispatch()).ok()?;
        RECORDS.set(true);
        Some(Self { device: device.clone(), open: true, _alone: alone })
    }

    /// Records the kernels that `step` launches, without running them. The step must not read from
    /// the device or write to it from the host. Its inputs must be tensors that the step or its
    /// caller keeps.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] where the device could not record the step; the step's results
    /// are lost then.
    pub fn record<T>(mut self, step: impl FnOnce() -> T) -> Result<(T, StepGraph), KernelError> {
        let dispatch = self.device.as_dispatch();
        Dispatch::graph_start_capture(dispatch).map_err(|error| failed(&error.to_string()))?;
        let output = step();
        self.open = false;
        let graph = Dispatch::graph_stop_capture(dispatch);
        let graph = graph.map_err(|error| failed(&error.to_string()))?;
        let device = self.device.clone();
        Ok((output, StepGraph { device, thread: thread::current().id(), graph }))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // An open capture would block all later ones.
        if self.open {
            let _ = Dispatch::graph_stop_capture(self.device.as_dispatch());
        }
        RECORDS.set(false);
    }
}

impl StepGraph {
    /// Runs the recorded kernels.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] on a thread other than the recording's, because the device
    /// would not order that thread's work against the graph's; and where the device fails.
    ///
    /// # Safety
    /// Every tensor that the step read or wrote must still exist, except those that it made itself.
    /// No other thread may use them until the graph's work is done.
    pub unsafe fn replay(&self) -> Result<(), KernelError> {
        if !self.is_own_thread() {
            return Err(failed("recorded on another thread"));
        }
        // SAFETY: the caller upholds the conditions.
        unsafe { Dispatch::graph_replay(self.device.as_dispatch(), &self.graph) }
            .map_err(|error| failed(&error.to_string()))
    }

    /// Whether this is the thread that recorded the step.
    pub fn is_own_thread(&self) -> bool {
        thread::current().id() == self.thread
    }
}

fn failed(reason: &str) -> KernelError {
    KernelError::Unsupported {
        op: OP,
        argument: "recording",
        actual: reason.to_string(),
        supported: "a recorded step, replayed on its own thread",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    /// Awaited work begins before a waiting recording.
    #[test]
    fn awaited_work_goes_before_recordings_that_wait() {
        let announced = device_work();
        let (begun, recording) = channel();
        thread::spawn(move || {
            let alone = Alone::begin();
            begun.send(()).unwrap();
            drop(alone);
        });
        while Work::lock().waiting == 0 {
            thread::yield_now();
        }
        let (done, awaited) = channel();
        thread::spawn(move || {
            drop(awaited_device_work());
            done.send(()).unwrap();
        });
        let minute = Duration::from_secs(60);
        awaited.recv_timeout(minute).expect("it waits for the recording, which waits for us");
        assert!(recording.try_recv().is_err(), "it began beside announced work");
        drop(announced);
        recording.recv_timeout(minute).expect("nobody is at work any more");
    }
}
