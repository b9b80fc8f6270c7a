//! The arguments and results of `linear` as backends take and return them.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};

/// The tensors that a product adds to its sums. A tensor that is not used may be any tensor.
#[derive(ExtensionType)]
pub(crate) struct Epilogue<B: Backend> {
    /// `[M]`
    pub(crate) bias: FloatTensor<B>,
    /// `[N, M]`, or `[N, M / 2]` where `gated`.
    pub(crate) residual: FloatTensor<B>,
    pub(crate) config: EpilogueConfig,
}

/// An [`Epilogue`] without its tensors. It applies the bias, then the gate, then the residual.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct EpilogueConfig {
    pub(crate) biased: bool,
    /// Whether `silu` of the first half of the outputs multiplies the second half.
    pub(crate) gated: bool,
    pub(crate) adds: bool,
}

impl EpilogueConfig {
    /// Outputs of the weight matrix that make one output of the op.
    pub(crate) fn parts(self) -> usize {
        if self.gated { 2 } else { 1 }
    }
}
