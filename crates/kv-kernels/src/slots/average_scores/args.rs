//! The arguments and results of `average_scores` as backends take and return them.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};

use super::AverageWeights;

/// The averages of slots, and the scores that are added to them.
#[derive(ExtensionType)]
pub(crate) struct AverageScoresArgs<B: Backend> {
    /// `[S]`, written in place.
    pub(crate) log_scores: FloatTensor<B>,
    /// `[S]`, written in place.
    pub(crate) log_samples: FloatTensor<B>,
    /// `[S, G]`
    pub(crate) logits: FloatTensor<B>,
    /// `[S]` where `weighted`, else any tensor.
    pub(crate) log_weights: FloatTensor<B>,
    /// Whether slots have weights.
    pub(crate) weighted: bool,
    pub(crate) weights: AverageWeights,
}
