//! How a total of slots is divided among layers and heads, exactly.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How the layers share `layers * budget` slots.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayerAllocation {
    /// Every layer has an equal budget.
    #[default]
    Uniform,
    /// Falls linearly with depth, from `2 * budget - budget / beta` to `budget / beta` (PyramidKV,
    /// equation 3; its public code takes `beta = 20`). As in the public code, a line that would
    /// start above the prompt's length starts at that length, and all layers have equal budgets for
    /// prompts below `2 * budget`. These budgets exclude reserved slots.
    Pyramid {
        /// Steepness.
        beta: f64,
    },
    /// Falls along a cosine with depth, `gamma + (1 - gamma) (1 + cos(pi l / N)) / 2`, scaled to
    /// the total (the schedule of PyramidInfer).
    Cosine {
        /// The deepest layer's share, where the first layer's share is 1.
        gamma: f64,
    },
    /// In proportion to given non-negative layer weights, such as the Fisher information of the
    /// key and value projections (KVReviver, appendix).
    Weights(Vec<f64>),
}

impl LayerAllocation {
    /// The slots of each of `layers` layers. They sum to `layers * budget` exactly, and none is
    /// above `tokens`, the prompt's length. Every layer first gets `reserved` slots (such as an
    /// observation window), as far as the budget reaches; the allocation divides the rest.
    ///
    /// Shares are real numbers and are rounded by largest remainder. Slots beyond the prompt's
    /// length go to layers that are below it.
    ///
    /// # Errors
    /// [`Error::InvalidAllocation`] for weights that are missing, negative or not finite, and for
    /// parameters outside their range.
    pub fn spread(
        &self,
        layers: usize,
        budget: usize,
        reserved: usize,
        tokens: usize,
    ) -> Result<Vec<usize>> {
        let invalid = |reason: String| Error::InvalidAllocation { reason };
        let reserved = reserved.min(budget);
        let (budget, cap) = (budget - reserved, tokens.saturating_sub(reserved));
        let base = budget as f64;
        let depth = |layer: usize| layer as f64 / layers.saturating_sub(1).max(1) as f64;
        let shares: Vec<f64> = match self {
            Self::Uniform => vec![base; layers],
            Self::Pyramid { beta } if *beta >= 1.0 => {
                let most = (2.0 * base - base / beta).min(cap as f64);
                let flat = (tokens as f64) < 2.0 * base || most < base;
                let most = if flat { base } else { most };
                let least = 2.0 * base - most;
                (0..layers).map(|layer| most - depth(layer) * (most - least)).collect()
            }
            Self::Pyramid { beta } => {
                return Err(invalid(format!("pyramid beta is {beta}, expected at least 1")));
            }
            Self::Cosine { gamma } if (0.0..=1.0).contains(gamma) => (0..layers)
                .map(|layer| {
                    let angle = std::f64::consts::PI * layer as f64 / layers as f64;
                    gamma + (1.0 - gamma) * (1.0 + angle.cos()) / 2.0
                })
                .collect(),
            Self::Cosine { gamma } => {
                return Err(invalid(format!("cosine gamma is {gamma}, expected 0 to 1")));
            }
            Self::Weights(weights) => {
                if weights.len() != layers {
                    let given = weights.len();
                    return Err(invalid(format!("{given} layer weights for {layers} layers")));
                }
                if weights.iter().any(|w| !w.is_finite() || *w < 0.0) {
                    return Err(invalid(format!("layer weights {weights:?} must be >= 0")));
                }
                weights.clone()
            }
        };
        let spread = apportion(&shares, layers * budget, 0, cap);
        Ok(spread.into_iter().map(|slots| slots + reserved).collect())
    }
}

/// How the key-value heads of a layer share `Hkv * budget` slots.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeadAllocation {
    /// Every head has an equal budget.
    #[default]
    Uniform,
    /// The heads of a sequence compete for slots by score (AdaKV). Each head first keeps its own
    /// best `floor * budget` tokens, the safeguard; the heads' joint top-k fills the rest. The
    /// total is exact.
    Ada {
        /// The safeguard, 0 to 1.
        floor: f64,
    },
    /// AdaKV as in its public code: a head's budget is the mean of its part of the joint top-k and
    /// of an equal budget, with the weights `1 - floor` and `floor`. Each budget is rounded by
    /// itself, so that the total may be off by a few slots.
    AdaOfficial {
        /// The safeguard, 0 to 1.
        floor: f64,
        /// Whether a head's scores are multiplied by the share of its mass that its own top-k has.
        normalize: bool,
    },
}

impl HeadAllocation {
    /// Checks the safeguard.
    ///
    /// # Errors
    /// [`Error::InvalidAllocation`] for a floor outside `[0, 1]`.
    pub fn validate(&self) -> Result<()> {
        match self {
            Self::Ada { floor } | Self::AdaOfficial { floor, .. }
                if !(0.0..=1.0).contains(floor) =>
            {
                let reason = format!("the heads' floor is {floor}, expected 0 to 1");
                Err(Error::InvalidAllocation { reason })
            }
            _ => Ok(()),
        }
    }
}

/// Scales `shares` so that they sum to `total` within `floor..=cap` each, and rounds them: floors
/// first, then the largest fractions, ties to the lower index. The sum is exact (or `cap` for every
/// entry, if the caps together are below the total).
pub fn apportion(shares: &[f64], total: usize, floor: usize, cap: usize) -> Vec<usize> {
    let count = shares.len();
    if count == 0 {
        return Vec::new();
    }
    let total = total.min(count.saturating_mul(cap));
    let floor = floor.min(total / count);
    let clamped = |scale: f64| -> Vec<f64> {
        shares.iter().map(|share| (share * scale).clamp(floor as f64, cap as f64)).collect()
    };
    // The clamped sum grows with the scale: bisect.
    let (mut low, mut high) = (0.0, 1.0);
    while clamped(high).iter().sum::<f64>() < total as f64 && high < 1e12 {
        high *= 2.0;
    }
    for _ in 0..100 {
        let middle = (low + high) / 2.0;
        if clamped(middle).iter().sum::<f64>() < total as f64 {
            low = middle;
        } else {
            high = middle;
        }
    }
    let exact = clamped(high);
    let mut result: Vec<usize> = exact.iter().map(|share| (share + 1e-9) as usize).collect();
    let fraction = |i: usize| exact[i] - (exact[i] + 1e-9).floor();
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by(|&a, &b| fraction(b).total_cmp(&fraction(a)).then(a.cmp(&b)));
    // Shares of zero may leave more than one round to hand out.
    let mut missing = total.saturating_sub(result.iter().sum());
    while missing > 0 {
        for &i in &order {
            if missing > 0 && result[i] < cap {
                result[i] += 1;
                missing -= 1;
            }
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_exact() {
        let all = [
            LayerAllocation::Uniform,
            LayerAllocation::Pyramid { beta: 20.0 },
            LayerAllocation::Cosine { gamma: 0.1 },
            LayerAllocation::Weights(vec![3.0, 0.0, 1.0, 7.5, 0.2, 2.0, 1.0]),
        ];
        for allocation in &all {
            // A budget that no prompt's length caps.
            let spread = allocation.spread(7, 512, 1, usize::MAX).unwrap();
            assert_eq!(spread.iter().sum::<usize>(), 7 * 512, "{allocation:?}");
        }
        for allocation in all {
            for budget in [1, 2, 17, 100, 399, 400] {
                for reserved in [0, 1, 8] {
                    let spread = allocation.spread(7, budget, reserved, 400).unwrap();
                    assert_eq!(spread.iter().sum::<usize>(), 7 * budget, "{allocation:?} {budget}");
                    let least = reserved.min(budget);
                    assert!(spread.iter().all(|n| (least..=400).contains(n)), "{spread:?}");
                }
            }
        }
    }

    #[test]
    fn pyramid_matches_the_line() {
        let spread = LayerAllocation::Pyramid { beta: 20.0 }.spread(3, 100, 0, 1000).unwrap();
        assert_eq!(spread, [195, 100, 5]);
    }

    #[test]
    fn short_prompts_flatten_the_pyramid() {
        let pyramid = LayerAllocation::Pyramid { beta: 20.0 };
        // The public code's 220, 159, 98, 37 for 128 slots of 512 tokens, whose line rounds down.
        assert_eq!(pyramid.spread(4, 128, 32, 512).unwrap(), [219, 158, 98, 37]);
        assert_eq!(pyramid.spread(4, 500, 32, 1000).unwrap(), [945, 648, 352, 55]);
        assert_eq!(pyramid.spread(4, 384, 32, 512).unwrap(), [384; 4]);
        assert_eq!(pyramid.spread(3, 4, 32, 512).unwrap(), [4; 3]);
    }

    #[test]
    fn a_cap_moves_slots_to_other_layers() {
        let weights = LayerAllocation::Weights(vec![10.0, 1.0, 1.0]);
        assert_eq!(weights.spread(3, 100, 0, 120).unwrap(), [120, 90, 90]);
    }

    #[test]
    fn bad_parameters_are_refused() {
        assert!(LayerAllocation::Pyramid { beta: 0.5 }.spread(3, 10, 0, 100).is_err());
        assert!(LayerAllocation::Weights(vec![1.0]).spread(3, 10, 0, 100).is_err());
        assert!(LayerAllocation::Weights(vec![1.0, -1.0, 0.0]).spread(3, 10, 0, 100).is_err());
    }
}
