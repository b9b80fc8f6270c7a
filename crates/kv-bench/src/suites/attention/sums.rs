//! The sums of one policy in a layer, and the similarity of the layer's queries.

use burn::tensor::{DType, Tensor};
use kv_core::read_f32;
use kv_policies::{CisOptions, Reads};

use super::read_metrics::ReadMetrics;
use crate::certificates::{FreezeError, Mean, MeasureErrors};

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
    pub(super) frozen: FreezeError,
    /// Similarity of the layer's queries; only the sums of the first policy have it.
    pub(super) similarity: Similarity,
}

impl Sums {
    /// `‖output − exact‖ / ‖exact‖` over all steps.
    pub(super) fn relative_error(&self) -> f64 {
        (self.difference / self.norm.max(f64::MIN_POSITIVE)).sqrt()
    }
}

/// Cosines of query heads with themselves a step before.
#[derive(Clone, Copy, Default)]
pub(super) struct Similarity {
    cosines: f64,
    alike: f64,
    steps: f64,
}

impl Similarity {
    /// Takes the queries `[1, Hq, T, D]` of a prompt whose last `steps` tokens are decoded,
    /// `T > steps`.
    pub(super) fn take(&mut self, queries: &Tensor<4>, steps: usize) -> anyhow::Result<()> {
        let last = queries.dims()[2] - steps;
        let part = |from: usize| queries.clone().narrow(2, from, steps).cast(DType::F32);
        let (before, now) = (part(last - 1), part(last));
        let product = |a: &Tensor<4>, b: &Tensor<4>| (a.clone() * b.clone()).sum_dim(3);
        let norms = (product(&before, &before) * product(&now, &now)).sqrt();
        let cosines = product(&before, &now) / norms.clamp_min(f32::MIN_POSITIVE);
        for cosine in read_f32("cosines", cosines.flatten::<1>(0, 3))? {
            self.cosines += f64::from(cosine);
            self.alike += f64::from(u8::from(cosine >= CisOptions::THRESHOLD));
            self.steps += 1.0;
        }
        Ok(())
    }

    /// The mean cosine, and the share that reaches CIS's threshold; none where nothing was taken.
    pub(super) fn means(&self) -> Option<(f64, f64)> {
        (self.steps > 0.0).then(|| (self.cosines / self.steps, self.alike / self.steps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turned_queries_are_not_alike() {
        let device = kv_core::select_device("cpu".parse().unwrap()).unwrap();
        // The first step's is longer, the second's turned by 53 degrees, the third's is nothing.
        let rows = [[1.0f32, 0.0], [3.0, 0.0], [3.0, 4.0], [0.0, 0.0]];
        let queries = Tensor::<2>::from_data(rows, (&device, DType::F32)).reshape([1, 1, 4, 2]);
        let mut similarity = Similarity::default();
        assert_eq!(similarity.means(), None);
        similarity.take(&queries, 3).unwrap();
        let (cosine, alike) = similarity.means().unwrap();
        assert!((cosine - 1.6 / 3.0).abs() < 1e-6 && (alike - 1.0 / 3.0).abs() < 1e-6);
    }
}
