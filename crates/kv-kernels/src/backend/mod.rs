//! Host code that the ops share: checks, errors, devices, buffers.
//!
//! - [`check`]: argument checks, all of which precede a launch.
//! - [`error`]: the reasons why an op refuses its arguments.
//! - [`limits`]: the largest tensor of a device, and its free memory.
//! - [`reading`]: asynchronous reads of integers.
//! - [`graph`]: steps recorded once and replayed as one launch.
//! - [`client`]: CubeCL devices: grids, vectors, new tensors.
//! - `cuda_context`: the driver's context of a CUDA device.
//! - [`optional`]: tensors that a call may lack.
//! - [`strategy`]: the choice among an op's kernels.
//! - [`host_buffers`]: tensor buffers on the CPU.

pub(crate) mod check;
#[cfg(feature = "gpu")]
pub(crate) mod client;
#[cfg(feature = "cuda")]
pub(crate) mod cuda_context;
pub(crate) mod error;
pub(crate) mod graph;
#[cfg(feature = "flex")]
pub(crate) mod host_buffers;
pub(crate) mod limits;
pub(crate) mod optional;
pub(crate) mod reading;
pub(crate) mod strategy;
