//! Means over steps, and the shares of bounds that are broken or above 1.

use std::collections::BTreeMap;

use super::ROUNDING;
use crate::record::metric;

/// A mean that is summed up.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mean {
    sum: f64,
    count: f64,
}

impl Mean {
    pub(crate) fn take(&mut self, value: f64) {
        self.add(Self { sum: value, count: 1.0 });
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.sum += other.sum;
        self.count += other.count;
    }

    /// The mean; `None` of no numbers.
    pub(crate) fn value(self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum / self.count)
    }
}

/// The quantity that is bounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Bound {
    /// The attention that a shared set drops (lemma 9, and odds).
    Dropped,
    /// How far a shared set is from the best (equation 42).
    Set,
    /// The attention that a window hides (theorem 7).
    Window,
    /// The attention that frozen keys move (theorem 8).
    FrozenKeys,
}

/// The share of bounds above 1, which say nothing, and the share of bounds that the quantity
/// exceeds.
#[derive(Clone, Copy, Debug, Default)]
struct Verdicts {
    above_one: Mean,
    broken: Mean,
}

/// Means by metric, over steps of a head, or of all heads of a layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Means {
    means: BTreeMap<&'static str, Mean>,
    verdicts: BTreeMap<Bound, Verdicts>,
}

impl Means {
    pub(crate) fn take(&mut self, metric: &'static str, value: f64) {
        self.means.entry(metric).or_default().take(value);
    }

    /// Takes an observed quantity and its bounds. `bound` counts as vacuous above 1; `least` is the
    /// tightest known bound, and counts as broken where `observed` exceeds it.
    pub(crate) fn judge(&mut self, of: Bound, observed: f64, [bound, least]: [f64; 2]) {
        let verdicts = self.verdicts.entry(of).or_default();
        verdicts.above_one.take(f64::from(u8::from(bound > 1.0)));
        verdicts.broken.take(f64::from(u8::from(observed > least + ROUNDING)));
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (metric, mean) in &other.means {
            self.means.entry(metric).or_default().add(*mean);
        }
        for (of, verdicts) in &other.verdicts {
            let own = self.verdicts.entry(*of).or_default();
            own.above_one.add(verdicts.above_one);
            own.broken.add(verdicts.broken);
        }
    }

    /// The mean of a metric; `None` where no number of the metric was taken.
    pub(crate) fn of(&self, metric: &str) -> Option<f64> {
        self.means.get(metric)?.value()
    }

    /// Whether there is any bound.
    pub(crate) fn bounds(&self) -> bool {
        !self.verdicts.is_empty()
    }

    /// All means, and the worst verdicts over the kinds of bounds.
    pub(crate) fn all(&self) -> Vec<(&'static str, f64)> {
        let means = self.means.iter().filter_map(|(metric, mean)| Some((*metric, mean.value()?)));
        let worst = |metric, of: fn(&Verdicts) -> Mean| {
            let shares = self.verdicts.values().filter_map(|verdicts| of(verdicts).value());
            Some((metric, shares.reduce(f64::max)?))
        };
        let worst = [
            worst(metric::BOUND_GT_1_SHARE, |verdicts| verdicts.above_one),
            worst(metric::BROKEN, |verdicts| verdicts.broken),
        ];
        means.chain(worst.into_iter().flatten()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Bound, Means};
    use crate::record::metric;

    #[test]
    fn heads_add_up_to_layers() {
        let (mut first, mut second) = (Means::default(), Means::default());
        first.take(metric::WINDOW_DROPPED_MASS, 0.5);
        first.judge(Bound::Window, 0.5, [0.25, 0.25]);
        first.judge(Bound::Dropped, 0.5, [1.5, 0.5]);
        for _ in 0..3 {
            second.take(metric::WINDOW_DROPPED_MASS, 0.1);
            second.judge(Bound::Window, 0.1, [1.0, 0.1]);
        }
        let mut layer = Means::default();
        layer.add(&first);
        layer.add(&second);
        assert!((layer.of(metric::WINDOW_DROPPED_MASS).unwrap() - 0.2).abs() < 1e-12);
        assert_eq!(layer.of(metric::FROZEN_KEY_TV), None);
        // A quarter of the bounds on hidden attention are broken, and the bound on dropped
        // attention is above 1.
        assert_eq!(layer.all()[1..], [(metric::BOUND_GT_1_SHARE, 1.0), (metric::BROKEN, 0.25)]);
        assert!(layer.bounds() && Means::default().all().is_empty());
    }
}
