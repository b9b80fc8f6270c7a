//! How much attention PSAW and ETF may change (PrHS, appendices B to E), in f64 on the host.

/// Attention that falls with distance at least as fast as a geometric tail: a query at distance `d`
/// gives a token behind the sinks at most `kappa (1 - rho) rho^d`, `rho = exp(-lambda)`. Eq. (44)
/// of PrHS.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recency {
    /// `lambda > 0`
    pub lambda: f64,
    /// `ln kappa`, since steep tails make it very large; the paper has `kappa` below 1.
    pub log_kappa: f64,
}

/// Key updates between layers that shrink with depth: at most `scale exp(-rate (l - start))` in
/// layer `l`. Eq. (45) of PrHS, with `B` the scale and `mu` the rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KeyDrift {
    /// `B`
    pub scale: f64,
    /// `mu >= 0`
    pub rate: f64,
}

/// The largest rate that is tried: beyond it the sum has one term in f64.
const STEEPEST: f64 = 40.0;
/// The least `lambda`, at which a tail is flat for all that fits into a context.
const FLATTEST: f64 = 1e-9;
/// By how much fits are widened against rounding, in logarithms.
const SLACK: f64 = 1e-9;

impl Recency {
    /// The constants whose tail is nowhere below `attention` and gives the tightest bound on the
    /// attention to tokens at `distance` or further. `attention[d]` is the most that any query of a
    /// layer gives a token behind the sinks at distance `d`, 0 for its own.
    ///
    /// `None` for attention that is 0 everywhere, which every tail bounds, or not finite.
    pub fn fit(attention: &[f64], distance: usize) -> Option<Self> {
        let logarithms: Vec<(f64, f64)> = attention
            .iter()
            .enumerate()
            .filter(|(_, mass)| **mass > 0.0 || mass.is_nan())
            .map(|(at, mass)| (at as f64, mass.ln()))
            .collect();
        if logarithms.is_empty() || logarithms.iter().any(|(_, log)| !log.is_finite()) {
            return None;
        }
        // A maximum of lines, less the logarithm of a concave function: convex.
        let log_kappa = |lambda: f64| {
            let tops = logarithms.iter().map(|(at, log)| log + lambda * at);
            tops.fold(f64::NEG_INFINITY, f64::max) - (-(-lambda).exp_m1()).ln()
        };
        let bound = |lambda: f64| log_kappa(lambda) - lambda * distance as f64;
        let lambda = lowest(bound, FLATTEST, STEEPEST);
        Some(Self { lambda, log_kappa: log_kappa(lambda) + SLACK })
    }

    /// The most attention that a query gives to all tokens behind the sinks at `distance` or
    /// further, `kappa exp(-lambda distance)`: theorem 7 as its proof has it, eq. (46).
    ///
    /// The theorem itself has `1 - τ_sink` in place of `kappa`, and calls it the larger one. But
    /// (44), summed over all distances, makes `kappa` the larger one. Attention that is all far
    /// away satisfies (44) and exceeds the theorem's bound.
    pub fn dropped_mass(&self, distance: usize) -> f64 {
        (self.log_kappa - self.lambda * distance as f64).exp()
    }
}

impl KeyDrift {
    /// The constants whose curve is nowhere below the updates, and on average least above them, in
    /// logarithms. `updates` has `(l - start, max ‖k_i^(l) - k_i^(l-1)‖)` of every layer that
    /// freezes, over its frozen tokens.
    ///
    /// `None` for updates that are all 0, or not finite.
    pub fn fit(updates: &[(usize, f64)]) -> Option<Self> {
        let logarithms: Vec<(f64, f64)> = updates
            .iter()
            .filter(|(_, update)| *update > 0.0 || update.is_nan())
            .map(|&(depth, update)| (depth as f64, update.ln()))
            .collect();
        if logarithms.is_empty() || logarithms.iter().any(|(_, log)| !log.is_finite()) {
            return None;
        }
        let log_scale = |rate: f64| {
            let tops = logarithms.iter().map(|(depth, log)| log + rate * depth);
            tops.fold(f64::NEG_INFINITY, f64::max)
        };
        let depths: f64 = logarithms.iter().map(|(depth, _)| depth).sum();
        let mean = depths / logarithms.len() as f64;
        let rate = lowest(|rate| log_scale(rate) - rate * mean, 0.0, STEEPEST);
        Some(Self { scale: (log_scale(rate) + SLACK).exp(), rate })
    }

    /// The largest change of attention, as half of the sum of all absolute changes, where a layer
    /// `depth` layers behind the first attends to frozen keys in place of its own: theorem 8, for
    /// queries of a norm up to `query_norm` and heads of `head_dim`.
    pub fn gap(&self, query_norm: f64, head_dim: usize, depth: usize) -> f64 {
        query_norm / (head_dim as f64).sqrt() * self.scale * (-self.rate * depth as f64).exp()
    }
}

/// Where a convex function is lowest, by golden sections.
fn lowest(function: impl Fn(f64) -> f64, mut low: f64, mut high: f64) -> f64 {
    const GOLDEN: f64 = 0.618_033_988_749_894_9;
    for _ in 0..200 {
        let width = GOLDEN * (high - low);
        if function(high - width) <= function(low + width) {
            high = low + width;
        } else {
            low = high - width;
        }
    }
    low
}
