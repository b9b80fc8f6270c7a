//! The sums of one policy in a layer.

use kv_policies::Reads;

use super::query_similarity::Similarity;
use super::read_metrics::ReadMetrics;
use crate::studies::certificates::{FreezeError, Mean, MeasureErrors};

/// One policy's sums over steps in a layer.
#[derive(Clone, Default)]
pub(super) struct Sums {
    pub(super) difference: f64,
    pub(super) norm: f64,
    pub(super) mass: Mean,
    /// How wrong LongFlow's measure is.
    pub(super) measures: MeasureErrors,
    /// What policies read that keep more, by query head.
    pub(super) reading: Vec<ReadMetrics>,
    pub(super) reads: Reads,
    /// What heads whose sizes are steered dropped when they were last measured.
    pub(super) steered: Mean,
    /// What frozen keys move.
    pub(super) moved: FreezeError,
    /// Of the layer's queries, among the first policy's sums.
    pub(super) similarity: Similarity,
}

impl Sums {
    /// `‖output − exact‖ / ‖exact‖` over all steps.
    pub(super) fn relative_error(&self) -> f64 {
        (self.difference / self.norm.max(f64::MIN_POSITIVE)).sqrt()
    }
}
