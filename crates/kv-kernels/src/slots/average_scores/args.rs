//! The arguments and results of `average_scores` as backends take and return them.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};

use super::AverageWeights;
use crate::backend::optional::OptionalFloat;

/// The averages of slots, and the scores that are added to them.
#[derive(ExtensionType)]
pub(crate) struct AverageScoresArgs<B: Backend> {
    /// `[S]`, written in place.
    pub(crate) log_scores: FloatTensor<B>,
    /// `[S]`, written in place.
    pub(crate) log_samples: FloatTensor<B>,
    /// `[S, G]`
    pub(crate) logits: FloatTensor<B>,
    /// `[S]`
    #[extension_type]
    pub(crate) log_weights: OptionalFloat<B>,
    pub(crate) weights: AverageWeights,
}
