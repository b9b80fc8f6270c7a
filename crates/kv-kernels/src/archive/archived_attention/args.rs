//! The arguments of `archived_attention` as backends take them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use crate::archive::pool::ArchiveTensors;
use crate::backend::optional::OptionalInt;

/// The query, the archived slots, the chosen ones, and the attention that is continued.
#[derive(ExtensionType)]
pub(crate) struct ArchivedAttentionArgs<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) query: FloatTensor<B>,
    #[extension_type]
    pub(crate) pool: ArchiveTensors<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// Ascending slots of each range, `[B * Hkv, M]`, where some come back.
    #[extension_type]
    pub(crate) chosen: OptionalInt<B>,
    /// `[B * Hkv]`
    #[extension_type]
    pub(crate) counts: OptionalInt<B>,
    /// `[B, Hq, D]`: the output so far.
    pub(crate) output: FloatTensor<B>,
    /// `[B, Hq]`: the log-sum-exp so far.
    pub(crate) log_sum_exp: FloatTensor<B>,
    /// The factor of logits.
    pub(crate) scale: f32,
    /// The most slots of a range, whole blocks.
    pub(crate) longest: usize,
}
