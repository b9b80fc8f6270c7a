//! What windows hide (PrHS's PSAW), and the bound on it.

use kv_policies::Recency;

/// Attention that one contender's windows hide in a layer, and how attention falls with distance there.
#[derive(Clone, Default)]
pub(super) struct Hidden {
    /// Of each query, how far away the nearest hidden token is, and the attention to all that are hidden.
    rows: Vec<(usize, f64)>,
    /// The most that any of them gives to a token behind the sinks, by distance.
    falls: Vec<f64>,
}

/// Means over queries.
pub(super) struct HiddenMeans {
    pub(super) hidden: f64,
    pub(super) bound: f64,
    /// The share of them whose bound is above 1, which says nothing.
    pub(super) vacuous: f64,
    /// The share of them whose bound does not hold.
    pub(super) broken: f64,
}

impl Hidden {
    /// Takes the attention of a query to all tokens, of which it sees the first `sinks` and those from `seen` on.
    pub(super) fn take(&mut self, attention: &[f64], sinks: usize, seen: usize) {
        if seen <= sinks {
            return;
        }
        let newest = attention.len() - 1;
        self.falls.resize(self.falls.len().max(attention.len()), 0.0);
        for (token, mass) in attention.iter().enumerate().skip(sinks) {
            let fall = &mut self.falls[newest - token];
            *fall = fall.max(*mass);
        }
        self.rows.push((newest + 1 - seen, attention[sinks..seen].iter().sum()));
    }

    /// Theorem 7, of constants that are fitted to what was seen; `None` where nothing was hidden.
    pub(super) fn means(&self) -> Option<HiddenMeans> {
        let nearest = self.rows.iter().map(|(distance, _)| *distance).min()?;
        let fit = Recency::fit(&self.falls, nearest)?;
        let of = |value: &dyn Fn(usize, f64) -> f64| {
            let sum: f64 = self.rows.iter().map(|(distance, mass)| value(*distance, *mass)).sum();
            sum / self.rows.len() as f64
        };
        let bound = |distance: usize| fit.dropped_mass(distance).min(1.0);
        Some(HiddenMeans {
            hidden: of(&|_, mass| mass),
            bound: of(&|distance, _| bound(distance)),
            vacuous: of(&|distance, _| f64::from(u8::from(fit.dropped_mass(distance) > 1.0))),
            broken: of(&|distance, mass| {
                f64::from(u8::from(mass > bound(distance) + super::ROUNDING))
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Hidden;

    #[test]
    fn what_is_hidden_is_bounded() {
        let mut hidden = Hidden::default();
        // A sink, and attention that halves with every token.
        for tokens in 20..40usize {
            let mut attention: Vec<f64> =
                (0..tokens).map(|token| 0.5f64.powi((tokens - token) as i32)).collect();
            attention[0] = 1.0 - attention[1..].iter().sum::<f64>();
            hidden.take(&attention, 1, tokens / 4);
        }
        let means = hidden.means().unwrap();
        assert!(means.hidden > 0.0 && means.broken == 0.0 && means.vacuous == 0.0);
        assert!(means.bound < 1.5 * means.hidden, "{} bounds {}", means.bound, means.hidden);
        let mut all = Hidden::default();
        all.take(&[0.5, 0.5], 1, 0);
        assert!(all.means().is_none(), "nothing is hidden");
    }
}
