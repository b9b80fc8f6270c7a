//! What ops share on the host: checks, errors, devices, buffers.
//!
//! - [`check`]: argument checks; everything is refused before a launch.
//! - [`error`]: why an op refused its arguments.
//! - [`limits`]: what a device can hold.
//! - [`reading`]: integers on their way from a device to the host.
//! - [`graph`]: a step's kernels recorded once and replayed as one launch.
//! - [`client`]: launches on CubeCL devices: grids, vectors, new tensors.
//! - [`strategy`]: which kernel of an op runs.
//! - [`host_buffers`]: tensors' buffers on the CPU.

pub(crate) mod check;
#[cfg(feature = "gpu")]
pub(crate) mod client;
pub(crate) mod error;
pub(crate) mod graph;
#[cfg(feature = "flex")]
pub(crate) mod host_buffers;
pub(crate) mod limits;
pub(crate) mod reading;
pub(crate) mod strategy;
