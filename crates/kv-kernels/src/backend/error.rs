use burn::tensor::DType;

/// The reason why an op refused its arguments. Nothing was launched and no tensor was changed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A tensor has another shape than the op's other arguments imply.
    #[error("{op}: `{argument}` has shape {actual:?}, expected {expected:?}")]
    Shape {
        /// The op.
        op: &'static str,
        /// The argument at fault.
        argument: &'static str,
        /// The shape that the other arguments imply.
        expected: Vec<usize>,
        /// The shape that was passed.
        actual: Vec<usize>,
    },
    /// The query heads are not a multiple of the key-value heads.
    #[error("{op}: {query_heads} query heads are not a multiple of {kv_heads} key-value heads")]
    HeadGroups {
        /// The op.
        op: &'static str,
        /// Query heads.
        query_heads: usize,
        /// Key-value heads.
        kv_heads: usize,
    },
    /// A dimension or parameter is outside what the op supports.
    #[error("{op}: `{argument}` is {actual}, supported: {supported}")]
    Unsupported {
        /// The op.
        op: &'static str,
        /// The dimension or parameter.
        argument: &'static str,
        /// Its value.
        actual: String,
        /// The supported values.
        supported: &'static str,
    },
    /// An index in a tensor is out of range.
    #[error("{op}: `{argument}` names {actual}, expected at least 0 and less than {expected}")]
    OutOfRange {
        /// The op.
        op: &'static str,
        /// The argument at fault.
        argument: &'static str,
        /// The number of valid indices.
        expected: usize,
        /// The index.
        actual: i64,
    },
    /// A tensor has another dtype than the op takes.
    #[error("{op}: `{argument}` is {actual:?}, expected {expected}")]
    Dtype {
        /// The op.
        op: &'static str,
        /// The argument at fault.
        argument: &'static str,
        /// The expected dtypes.
        expected: &'static str,
        /// The argument's dtype.
        actual: DType,
    },
    /// Two tensors live on different devices.
    #[error("{op}: `{argument}` is on {actual}, the other tensors are on {expected}")]
    Device {
        /// The op.
        op: &'static str,
        /// The argument at fault.
        argument: &'static str,
        /// The first tensor's device.
        expected: String,
        /// The argument's device.
        actual: String,
    },
    /// A forced kernel cannot run the call.
    #[error("{op}: strategy {strategy} is not available: {why}")]
    Unavailable {
        /// The op.
        op: &'static str,
        /// The strategy.
        strategy: String,
        /// The reason.
        why: &'static str,
    },
    /// The op has neither a kernel nor a reference for this device.
    #[error(
        "{op}: no implementation for device {device}; use a CPU (`flex`), CUDA, Vulkan or wgpu \
         device without autodiff"
    )]
    UnsupportedDevice {
        /// The op.
        op: &'static str,
        /// The device.
        device: String,
    },
}
