//! The arguments of `quantize_slots` as backends take them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use crate::quantized::pool::QuantizedTensors;

/// The pool that is written, and the slots that are quantised.
#[derive(ExtensionType)]
pub(crate) struct QuantizeArgs<B: Backend> {
    /// The pool, written in place.
    #[extension_type]
    pub(crate) pool: QuantizedTensors<B>,
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) values: FloatTensor<B>,
    /// `[P, M]`
    pub(crate) from: IntTensor<B>,
    /// `[P]`
    pub(crate) to: IntTensor<B>,
}
