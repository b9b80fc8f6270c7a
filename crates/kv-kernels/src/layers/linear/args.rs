//! The arguments and results of `linear` as backends take and return them.

use burn::backend::{Backend, ExtensionType};

use crate::backend::optional::OptionalFloat;

/// The tensors that a product adds to its sums.
#[derive(ExtensionType)]
pub(crate) struct Epilogue<B: Backend> {
    /// `[M]`
    #[extension_type]
    pub(crate) bias: OptionalFloat<B>,
    /// `[N, M]`, or `[N, M / 2]` where `gated`.
    #[extension_type]
    pub(crate) residual: OptionalFloat<B>,
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
