//! The arguments of `quantized_attention` as backends take them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::QuantizedStrategy;
use crate::quantized::pool::QuantizedTensors;

/// The query, the quantised slots, and the attention that is continued.
#[derive(ExtensionType)]
pub(crate) struct QuantizedAttentionArgs<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) query: FloatTensor<B>,
    #[extension_type]
    pub(crate) pool: QuantizedTensors<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[B, Hq, D]`: the output so far.
    pub(crate) output: FloatTensor<B>,
    /// `[B, Hq]`: the log-sum-exp so far.
    pub(crate) log_sum_exp: FloatTensor<B>,
    /// The factor of logits.
    pub(crate) scale: f32,
    /// The most slots of a range, whole blocks.
    pub(crate) longest: usize,
    pub(crate) strategy: QuantizedStrategy,
}
