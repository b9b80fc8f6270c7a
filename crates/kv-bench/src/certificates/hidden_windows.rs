//! The attention that windows hide (PrHS's PSAW), and the bound on it (theorem 7).

use std::collections::BTreeMap;

use kv_policies::Recency;

use super::fit_check_split::FitCheck;
use super::means::{Bound, Means};
use crate::record::metric;

/// The attention that the windows of one policy hide from a head, by class of prompts.
#[derive(Clone, Default)]
pub(crate) struct HiddenMass(BTreeMap<usize, Class>);

/// The attention that windows hide in prompts of about a length, and how attention falls with
/// distance there.
#[derive(Clone, Default)]
struct Class {
    /// The distance of the nearest hidden token and the attention to all hidden tokens, for each
    /// query that the bound is checked on.
    rows: Vec<(usize, f64)>,
    /// The most attention that any query of the fitted prompts gives to a token behind the sinks,
    /// by distance.
    falls: Vec<f64>,
    /// The least distance of a hidden token from a query of the fitted prompts: the bound is to be
    /// tightest there.
    nearest: Option<usize>,
}

impl HiddenMass {
    /// Adds the attention of a query to all tokens. It sees the first `sinks` tokens and all tokens
    /// from `seen` on.
    pub(crate) fn take(
        &mut self,
        attention: &[f64],
        [sinks, seen]: [usize; 2],
        fit_check: FitCheck,
    ) {
        if seen <= sinks {
            return;
        }
        let newest = attention.len() - 1;
        let distance = newest + 1 - seen;
        let Class { rows, falls, nearest } = self.0.entry(fit_check.class).or_default();
        if fit_check.fits {
            *nearest = Some(nearest.map_or(distance, |nearest| nearest.min(distance)));
            falls.resize(falls.len().max(attention.len()), 0.0);
            for (token, mass) in attention.iter().enumerate().skip(sinks) {
                let fall = &mut falls[newest - token];
                *fall = fall.max(*mass);
            }
        }
        if fit_check.checks {
            rows.push((distance, attention[sinks..seen].iter().sum()));
        }
    }

    /// Theorem 7 with the constants of each class, over all queries that the bound is checked on.
    pub(crate) fn conclude(&self, means: &mut Means) {
        for Class { rows, falls, nearest } in self.0.values() {
            let fit = nearest.and_then(|nearest| Recency::fit(falls, nearest));
            let Some(fit) = fit else { continue };
            for (distance, hidden) in rows {
                let bound = fit.dropped_mass(*distance);
                means.take(metric::WINDOW_DROPPED_MASS, *hidden);
                means.take(metric::WINDOW_DROPPED_BOUND, bound.min(1.0));
                means.judge(Bound::Window, *hidden, [bound, bound]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{FitCheck, HiddenMass, Means};
    use crate::record::metric;

    /// A sink, and attention that falls by `ratio` with every token.
    fn falling(tokens: usize, ratio: f64) -> Vec<f64> {
        let mut attention: Vec<f64> =
            (0..tokens).map(|token| 0.5 * ratio.powi((tokens - token) as i32)).collect();
        attention[0] = 1.0 - attention[1..].iter().sum::<f64>();
        attention
    }

    fn means(hidden: &HiddenMass) -> Means {
        let mut means = Means::default();
        hidden.conclude(&mut means);
        means
    }

    #[test]
    fn what_is_hidden_is_bounded() {
        let both = FitCheck { class: 0, fits: true, checks: true };
        let mut hidden = HiddenMass::default();
        for tokens in 20..40usize {
            hidden.take(&falling(tokens, 0.5), [1, tokens / 4], both);
        }
        let own = means(&hidden);
        let [mass, bound] = [metric::WINDOW_DROPPED_MASS, metric::WINDOW_DROPPED_BOUND]
            .map(|of| own.of(of).unwrap());
        assert!(mass > 0.0 && mass <= bound && bound < 1.5 * mass, "{bound} bounds {mass}");
        assert_eq!(own.all()[2..], [(metric::BOUND_GT_1_SHARE, 0.0), (metric::BROKEN, 0.0)]);
        let mut all = HiddenMass::default();
        all.take(&[0.5, 0.5], [1, 0], both);
        assert!(!means(&all).bounds(), "nothing is hidden");
    }

    /// Constants that are fitted to steep attention do not bound flatter attention, and each class
    /// has constants of its own.
    #[test]
    fn bounds_are_checked_on_what_they_are_not_fitted_to() {
        let mut hidden = HiddenMass::default();
        let mut take = |ratio: f64, class: usize, fits: bool| {
            let fit_check = FitCheck { class, fits, checks: !fits };
            hidden.take(&falling(30, ratio), [1, 10], fit_check);
            means(&hidden)
        };
        assert!(!take(0.5, 0, true).bounds(), "nothing is checked");
        assert!(!take(0.8, 1, false).bounds(), "nothing is fitted to");
        let own = take(0.8, 0, false);
        assert!(own.of(metric::WINDOW_DROPPED_MASS) > own.of(metric::WINDOW_DROPPED_BOUND));
        assert_eq!(own.all()[2..], [(metric::BOUND_GT_1_SHARE, 0.0), (metric::BROKEN, 1.0)]);
        // The other class's hold, and are half of all.
        let both = take(0.8, 1, true);
        assert_eq!(both.all()[3], (metric::BROKEN, 0.5));
    }
}
