//! The arguments and results of `decode_attention` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::DecodeConfig;
use crate::backend::optional::{OptionalFloat, OptionalInt};

/// The arguments of decode attention.
#[derive(ExtensionType)]
pub(crate) struct DecodeArgs<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) query: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) values: FloatTensor<B>,
    /// `[S]`
    #[extension_type]
    pub(crate) log_weights: OptionalFloat<B>,
    /// Weights of the values alone, `[S]`.
    #[extension_type]
    pub(crate) numerators: OptionalFloat<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// A row for each key-value head: the start of its window, its listed slots, or its index set.
    #[extension_type]
    pub(crate) view: OptionalInt<B>,
    pub(crate) config: DecodeConfig,
}

/// The results of decode attention.
#[derive(ExtensionType)]
pub(crate) struct DecodeTensors<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) output: FloatTensor<B>,
    /// `[B, Hq]`; a placeholder of one element where it is not asked for.
    pub(crate) log_sum_exp: FloatTensor<B>,
    /// Probabilities or logits, `[S, G]`; a placeholder of one element where neither are asked for.
    pub(crate) scores: FloatTensor<B>,
}
