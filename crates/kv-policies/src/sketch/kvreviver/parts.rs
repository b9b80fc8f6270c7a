//! How a budget is shared among the exact parts and the sketch.

use kv_core::counted;

use super::NAME;
use crate::{PolicyError, Result};

/// Shares of the budget.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Shares {
    pub(super) recent: f64,
    pub(super) candidate: f64,
    pub(super) sketch: f64,
}

/// A head's parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Parts {
    /// Slots for the most recent tokens.
    pub(super) recents: usize,
    /// Slots for tokens of the highest scores.
    pub(super) candidates: usize,
    /// `b`: entries of each of the sketch's buckets.
    pub(super) entries: usize,
}

/// The least slots: an entry in each bucket, a recent token and a candidate.
pub(super) fn least(buckets: usize) -> usize {
    buckets + 2
}

impl Shares {
    pub(super) fn validate(self) -> std::result::Result<(), String> {
        let Self { recent, candidate, sketch } = self;
        let named = [("recent", recent), ("candidate", candidate), ("sketch_share", sketch)];
        if let Some((name, share)) = named.iter().find(|(_, share)| !(0.0..1.0).contains(share)) {
            return Err(format!("`{name}` is {share}, expected a share from 0 to below 1"));
        }
        let total = recent + candidate + sketch;
        if (total - 1.0).abs() > 1e-6 || recent + candidate == 0.0 {
            return Err(format!(
                "`recent`, `candidate` and `sketch_share` are {recent}, {candidate} and {sketch}, \
                 expected \
                 shares that add up to 1, not all of them the sketch's"
            ));
        }
        Ok(())
    }

    /// Parts of `budget` slots: the sketch gets its share in whole entries of all buckets, at least
    /// one; the exact parts get the rest, at least a slot each.
    pub(super) fn of(self, budget: usize, buckets: usize) -> Result<Parts> {
        let least = least(buckets);
        if budget < least {
            return Err(PolicyError::InvalidConfig {
                policy: NAME.into(),
                reason: format!(
                    "a budget of {} per head, expected at least {least}: an entry in each of {}, a \
                     recent token and a candidate",
                    counted(budget, "slot"),
                    counted(buckets, "bucket")
                ),
            });
        }
        let wanted = (budget as f64 * self.sketch) as usize / buckets;
        let entries = wanted.min((budget - 2) / buckets).max(1);
        let exact = budget - entries * buckets;
        let recent = self.recent / (self.recent + self.candidate);
        let recents = ((exact as f64 * recent).round() as usize).clamp(1, exact - 1);
        Ok(Parts { recents, candidates: exact - recents, entries })
    }
}

impl Parts {
    /// Slots that are kept exactly.
    pub(super) fn exact(self) -> usize {
        self.recents + self.candidates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAPER: Shares = Shares { recent: 0.45, candidate: 0.45, sketch: 0.1 };

    #[test]
    fn parts_add_up_to_the_budget() {
        for budget in 5..3_000 {
            let parts = PAPER.of(budget, 3).unwrap();
            assert_eq!(parts.exact() + 3 * parts.entries, budget, "{budget}");
            assert!(parts.recents.abs_diff(parts.candidates) <= 1, "{budget}: {parts:?}");
            let sketch = 3.0 * parts.entries as f64;
            assert!(sketch <= (0.1 * budget as f64).max(3.0), "{budget}: {parts:?}");
        }
        assert_eq!(PAPER.of(410, 3).unwrap(), Parts { recents: 186, candidates: 185, entries: 13 });
    }

    /// However much of it is the sketch's.
    #[test]
    fn the_exact_parts_have_a_slot_each() {
        for sketch in [0.0, 0.1, 0.5, 0.9, 0.99, 0.999_999] {
            for recent in [0.001, 0.2, 0.999] {
                let rest = 1.0 - sketch;
                let shares =
                    Shares { sketch, recent: rest * recent, candidate: rest * (1.0 - recent) };
                shares.validate().unwrap();
                for buckets in 1..=9 {
                    for budget in least(buckets)..300 {
                        let parts = shares.of(budget, buckets).unwrap();
                        let Parts { recents, candidates, entries } = parts;
                        assert!(recents.min(candidates).min(entries) > 0, "{budget}: {parts:?}");
                        assert_eq!(parts.exact() + buckets * entries, budget, "{parts:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn budgets_below_the_minimum_name_it() {
        for (budget, buckets) in [(4, 3), (0, 1), (8, 9)] {
            let error = PAPER.of(budget, buckets).unwrap_err().to_string();
            assert!(error.contains(&format!("at least {}", buckets + 2)), "{error}");
        }
    }
}
