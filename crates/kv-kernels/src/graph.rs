//! A step's kernels recorded once and replayed as one launch: a CUDA graph, or what the device's
//! runtime has in its place.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::{self, ThreadId};

use burn::backend::{Backend, BackendTypes, Dispatch};
use burn::tensor::Device;

use crate::KernelError;

const OP: &str = "graph";

/// Held by recordings alone, shared by all other work.
static WORK: RwLock<()> = RwLock::new(());

thread_local! {
    /// How often this thread has announced work, and its share of [`WORK`].
    static SHARED: RefCell<(usize, Option<RwLockReadGuard<'static, ()>>)> =
        const { RefCell::new((0, None)) };
    /// Whether this thread records.
    static RECORDS: Cell<bool> = const { Cell::new(false) };
}

/// Work on a device: while it lives, no other thread records. See [`device_work`].
#[must_use = "it is work only while it lives"]
#[derive(Debug)]
pub struct DeviceWork {
    /// It belongs to its thread.
    _own: PhantomData<*const ()>,
}

/// Announces work on a device, and waits while another thread records: CUDA refuses allocations and
/// reads then, and what is being recorded is lost with them. Sessions of models and caches' reads do
/// this by themselves; other work on a device on which another thread may record should.
pub fn device_work() -> DeviceWork {
    if !RECORDS.get() {
        SHARED.with_borrow_mut(|(count, guard)| {
            *count += 1;
            guard.get_or_insert_with(|| WORK.read().unwrap_or_else(PoisonError::into_inner));
        });
    }
    DeviceWork { _own: PhantomData }
}

impl Drop for DeviceWork {
    fn drop(&mut self) {
        if !RECORDS.get() {
            SHARED.with_borrow_mut(|(count, guard)| {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    *guard = None;
                }
            });
        }
    }
}

/// A recording under way: the step must run once, as a warm-up, between [`Self::begin`] and
/// [`Self::record`], all on one thread, and nothing else should run on it in between: what the
/// warm-up left in the device's pools is all the memory that the recording gets. Threads that
/// announce their work ([`device_work`]) wait until it is over.
#[derive(Debug)]
pub struct Recording {
    device: Device,
    open: bool,
    _alone: RwLockWriteGuard<'static, ()>,
}

/// A recorded step.
#[derive(Debug)]
pub struct StepGraph {
    device: Device,
    thread: ThreadId,
    graph: <Dispatch as BackendTypes>::GraphPrimitive,
}

impl Recording {
    /// Begins, when all announced work of other threads is done; `None` on devices that cannot
    /// record, or while this thread records something else or has announced work.
    pub fn begin(device: &Device) -> Option<Self> {
        let records = match device.as_dispatch() {
            #[cfg(feature = "gpu")]
            burn::backend::DispatchDevice::Cube(_) => true,
            #[allow(unreachable_patterns)]
            _ => false,
        };
        if !records || RECORDS.get() || SHARED.with_borrow(|(count, _)| *count > 0) {
            return None;
        }
        let alone = WORK.write().unwrap_or_else(PoisonError::into_inner);
        Dispatch::graph_prepare(device.as_dispatch()).ok()?;
        RECORDS.set(true);
        Some(Self { device: device.clone(), open: true, _alone: alone })
    }

    /// Records the kernels that `step` launches, without running them. The step must neither read
    /// from the device nor write to it from the host, and take its inputs from tensors that it, or
    /// its caller, keeps.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] where the device could not record it; what the step was to write
    /// is lost then.
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
        // A recording that was begun would block all later ones.
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
    /// [`KernelError::Unsupported`] from another thread than the recording's, whose work the device
    /// would not order against the graph's, and where the device fails.
    ///
    /// # Safety
    /// Every tensor that the step read or wrote must still exist, but for those that it made itself,
    /// and no other thread may use them until the graph's work is done.
    pub unsafe fn replay(&self) -> Result<(), KernelError> {
        if !self.is_own_thread() {
            return Err(failed("recorded on another thread"));
        }
        // SAFETY: the caller's.
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
