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
    /// Errors of the measure by which LongFlow ranks slots, with their bounds.
    pub(super) measures: MeasureErrors,
    /// The tokens that each query head read, for policies that keep more than they read.
    pub(super) reading: Vec<ReadMetrics>,
    pub(super) reads: Reads,
    /// The attention that heads with a target dropped when it was last measured.
    pub(super) steered: Mean,
    /// The attention that frozen keys move.
    pub(super) moved: FreezeError,
    /// Similarity of the layer's queries; only the sums of the first policy have it.
    pub(super) similarity: Similarity,
}

impl Sums {
    /// `‖output − exact‖ / ‖exact‖` over all steps.
    pub(super) fn relative_error(&self) -> f64 {
        (self.difference / self.norm.max(f64::MIN_POSITIVE)).sqrt()
    }
}
