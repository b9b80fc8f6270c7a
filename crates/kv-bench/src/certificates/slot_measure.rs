//! The error of the measure by which LongFlow ranks slots, and the bounds on it.

use kv_policies::Certificate;

use crate::record::metric;

/// Certificates of one policy in a layer.
#[derive(Clone, Default)]
pub(crate) struct MeasureErrors(Vec<Certificate>);

impl MeasureErrors {
    pub(crate) fn take(&mut self, certificates: Vec<Certificate>) {
        self.0.extend(certificates);
    }

    /// Medians of the bounded quantities and of their bounds, since a few outliers would dominate a
    /// mean; the share of logit bounds of at least 1, which say nothing; and the share of
    /// certificates whose quantity exceeds its bound. There are none without certificates.
    pub(crate) fn records(&self) -> Vec<(&'static str, f64)> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let median = |of: &dyn Fn(&Certificate) -> f64| {
            let mut all: Vec<f64> = self.0.iter().map(of).collect();
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        let share = |of: &dyn Fn(&Certificate) -> bool| {
            self.0.iter().filter(|certificate| of(certificate)).count() as f64 / self.0.len() as f64
        };
        // Rounding, in f64, of sums of a whole cache.
        let above = |value: f64, bound: f64| value > bound * (1.0 + 1e-9) + 1e-12;
        let broken = |c: &Certificate| {
            above(c.eviction_residual, c.eviction_residual_bound)
                || above(c.logit_change, c.logit_change_bound)
                || above(c.error, c.error_bound)
        };
        vec![
            (metric::EVICTION_RESIDUAL, median(&|c| c.eviction_residual)),
            (metric::EVICTION_RESIDUAL_BOUND, median(&|c| c.eviction_residual_bound)),
            (metric::LOGIT_CHANGE, median(&|c| c.logit_change)),
            (metric::LOGIT_CHANGE_BOUND, median(&|c| c.logit_change_bound)),
            (metric::OBSERVED_ERROR, median(&|c| c.error)),
            (metric::ERROR_BOUND, median(&|c| c.error_bound)),
            // Shares change by no more than 1 in any case.
            (metric::BOUND_GT_1_SHARE, share(&|c| c.logit_change_bound >= 1.0)),
            (metric::BROKEN, share(&broken)),
        ]
    }
}
