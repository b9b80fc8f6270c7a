//! The arguments and results of the ops that add probabilities as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::GroupReduction;

/// A step's attention probabilities, as logits and log-sum-exps, and the sums that they are added
/// to.
#[derive(ExtensionType)]
pub(crate) struct ProbabilityArgs<B: Backend> {
    /// `[S]`, written in place.
    pub(crate) sums: FloatTensor<B>,
    /// `[S, G]`
    pub(crate) logits: FloatTensor<B>,
    /// `[B, Hq]`
    pub(crate) log_sum_exp: FloatTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    pub(crate) reduction: GroupReduction,
}
