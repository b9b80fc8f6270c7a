//! Memory of a CUDA device into which other processes' kernels write.

use cudarc::driver::{DriverError, result, sys};

use super::kernel::LINES;
use super::slots::SLOTS;
use crate::backend::cuda_context;

/// Bytes of a handle, by which another process opens an inbox.
pub const HANDLE: usize = size_of::<sys::CUipcMemHandle>();

/// Bytes of a line: two words, and a turn beside each.
pub(super) const LINE: usize = 16;
/// Bytes of a slot: a word, and a turn.
pub(super) const SLOT: usize = 8;

/// Why ranks cannot write into each other's memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{action}: {reason}")]
pub struct PeerError {
    /// What was tried.
    pub action: &'static str,
    /// What the driver said.
    pub reason: String,
}

fn failed(action: &'static str) -> impl FnOnce(DriverError) -> PeerError {
    move |error| PeerError { action, reason: error.to_string() }
}

/// Memory of a rank's GPU, into which all other ranks write. It lives as long as the process: the
/// others may write to the end.
#[derive(Debug)]
pub struct Inbox {
    /// The device's number.
    device: usize,
    address: sys::CUdeviceptr,
}

impl Inbox {
    /// An inbox for numbers of so many ranks, in the memory of CUDA device `device`.
    ///
    /// # Errors
    /// [`PeerError`] without such a device or without memory.
    pub fn new(device: usize, ranks: usize) -> Result<Self, PeerError> {
        make_current(device)?;
        let bytes = 2 * ranks * (LINES * LINE + SLOTS * SLOT);
        // SAFETY: the device's context is current, and the memory is cleared as far as it reaches.
        let address = unsafe {
            let address =
                result::malloc_sync(bytes).map_err(failed("allocating memory for sums"))?;
            result::memset_d8_sync(address, 0, bytes)
                .map_err(failed("clearing memory for sums"))?;
            address
        };
        Ok(Self { device, address })
    }

    /// The bytes by which another process opens the inbox.
    ///
    /// # Errors
    /// [`PeerError`] where the system does not share memory between processes.
    pub fn handle(&self) -> Result<[u8; HANDLE], PeerError> {
        make_current(self.device)?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE] };
        // SAFETY: the address is that of an allocation of the current context.
        unsafe { sys::cuIpcGetMemHandle(&raw mut handle, self.address) }
            .result()
            .map_err(failed("sharing memory for sums"))?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    /// The address at which this rank's device reaches another rank's inbox.
    pub(super) fn open(&self, handle: &[u8; HANDLE]) -> Result<u64, PeerError> {
        make_current(self.device)?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: the handle is another process's, and the current context is that of this rank's
        // device, whose kernels use the address.
        unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) }
            .result()
            .map_err(failed("opening another rank's memory for sums"))?;
        Ok(address)
    }

    /// The address of the inbox.
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

/// Makes the device's context this thread's.
fn make_current(device: usize) -> Result<(), PeerError> {
    cuda_context::make_current(device).map_err(failed("using a CUDA device for sums"))
}
