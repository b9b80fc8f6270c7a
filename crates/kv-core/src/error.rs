use std::path::PathBuf;

use burn::tensor::DType;
use kv_kernels::KernelError;

use crate::counted;

/// What can go wrong with a cache. The cache is unchanged after an error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A kernel refused its arguments.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A tensor has another shape than the cache expects.
    #[error("`{what}` has shape {actual:?}, expected {expected:?}")]
    Shape {
        /// The tensor.
        what: &'static str,
        /// What the cache expects.
        expected: Vec<usize>,
        /// What was passed.
        actual: Vec<usize>,
    },
    /// A tensor's element type does not fit the cache.
    #[error("`{what}` is {actual:?}, expected {expected:?}")]
    Dtype {
        /// The tensor.
        what: &'static str,
        /// The cache's element type.
        expected: DType,
        /// What was passed.
        actual: DType,
    },
    /// A head has no free slot.
    #[error(
        "sequence {sequence}, key-value head {head}: {} requested, capacity is {capacity}; \
         reserve more room or build the cache growable",
        counted(*.requested, "slot")
    )]
    CapacityExhausted {
        /// The sequence.
        sequence: usize,
        /// The key-value head.
        head: usize,
        /// Slots that the head can hold.
        capacity: usize,
        /// Slots that it would need.
        requested: usize,
    },
    /// An arena has no room for a sequence.
    #[error(
        "an arena cannot take {}: {free} are free; wait until other sequences leave",
        counted(*.requested, "slot")
    )]
    ArenaFull {
        /// Slots of all heads of the sequence.
        requested: usize,
        /// Free slots.
        free: usize,
    },
    /// A slot or token index lies outside its range.
    #[error("{what}: index {index} is out of range, {limit} are there")]
    IndexOutOfRange {
        /// What was indexed.
        what: &'static str,
        /// The index.
        index: usize,
        /// The number of valid indices.
        limit: usize,
    },
    /// A selection or plan contradicts itself or the cache.
    #[error("{what}: {reason}")]
    InvalidPlan {
        /// What was asked for, such as `selection` or `limits`.
        what: &'static str,
        /// What is wrong, with the values.
        reason: String,
    },
    /// A budget cannot be met.
    #[error("budget {budget}: {reason}")]
    InvalidBudget {
        /// The budget as given.
        budget: String,
        /// Why.
        reason: String,
    },
    /// A budget cannot be divided among layers or heads as asked.
    #[error("allocation: {reason}")]
    InvalidAllocation {
        /// What is wrong, with the value and what was expected.
        reason: String,
    },
    /// A device string that names no known backend.
    #[error("unknown device `{requested}`{suggestion}; available: {available}")]
    UnknownDevice {
        /// The string.
        requested: String,
        /// ` (did you mean ...?)`, or empty.
        suggestion: String,
        /// The devices of this machine and build.
        available: String,
    },
    /// The backend exists but was not compiled in.
    #[error(
        "device `{requested}` needs the cargo feature `{feature}`, which this build lacks; \
         available: {available}"
    )]
    BackendNotCompiled {
        /// The device string.
        requested: String,
        /// The feature to enable.
        feature: &'static str,
        /// The devices of this machine and build.
        available: String,
    },
    /// The backend is there but this machine lacks the device.
    #[error("device `{requested}` is not there: {reason}; available: {available}")]
    DeviceNotFound {
        /// The device string.
        requested: String,
        /// What was found instead.
        reason: String,
        /// The devices of this machine and build.
        available: String,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file is no saved cache, or not one of this cache's model.
    #[error("{path}: not a usable saved cache: {reason}")]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Data could not be read from the device.
    #[error("reading `{what}` from the device failed: {reason}")]
    Read {
        /// The tensor.
        what: &'static str,
        /// The backend's error.
        reason: String,
    },
}
