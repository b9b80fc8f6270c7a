//! The parts of a model's layer besides attention, fused for decode steps.
//!
//! - [`linear`]: products of a few rows with a weight matrix, with norm, bias, gate and residual.
//! - [`heads`]: projections split into heads: norms, RoPE, and new tokens written into slots.
//! - [`rms_norm`]: root-mean-square norm, alone or after an addition.
//! - [`swiglu`]: the gate of a Llama MLP.
//! - [`sample`]: next tokens drawn on the device.
//! - [`random`]: counter-based random numbers, which are equal on all devices.

pub(crate) mod heads;
pub(crate) mod linear;
pub(crate) mod random;
pub(crate) mod rms_norm;
pub(crate) mod sample;
pub(crate) mod swiglu;
