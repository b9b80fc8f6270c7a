//! The arguments of `signature_scores` as backends take them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::SignatureStrategy;
use crate::archive::pool::ArchiveTensors;

/// The query, the archived slots, and the attention to others.
#[derive(ExtensionType)]
pub(crate) struct SignatureScoresArgs<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) query: FloatTensor<B>,
    #[extension_type]
    pub(crate) pool: ArchiveTensors<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[B, Hq]`
    pub(crate) log_sum_exp: FloatTensor<B>,
    /// The factor of logits.
    pub(crate) scale: f32,
    /// `T`
    pub(crate) columns: usize,
    pub(crate) wanted: usize,
    /// A kernel, not `Auto`, unless on a CPU.
    pub(crate) strategy: SignatureStrategy,
}
