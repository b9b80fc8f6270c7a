//! What keys taken from the layer below move (PrHS's ETF, appendix D), and the bound on it.

use std::ops::Range;

use kv_policies::{FrozenTokens, KeyDrift};

/// What one layer's frozen keys move.
#[derive(Clone, Default)]
pub(super) struct Moved {
    /// The largest difference between a frozen key and the layer's own.
    update: f64,
    /// The longest query.
    query_norm: f64,
    /// Half of the sum of all changes of a query's attention: sum, most, and how many queries.
    moved: f64,
    most: f64,
    queries: f64,
}

/// Means over queries.
pub(super) struct MovedMeans {
    pub(super) moved: f64,
    pub(super) bound: f64,
    /// Whether the bound is above 1, which says nothing.
    pub(super) vacuous: bool,
    /// Whether any query's attention is moved further.
    pub(super) broken: bool,
}

/// A layer's keys or queries, `[heads, tokens, head_dim]`, on the host.
pub(super) struct Heads<'a> {
    pub(super) values: &'a [f32],
    pub(super) heads: usize,
    pub(super) tokens: usize,
}

impl Heads<'_> {
    fn head_dim(&self) -> usize {
        self.values.len() / (self.heads * self.tokens)
    }

    fn row(&self, head: usize, token: usize) -> &[f32] {
        let dim = self.head_dim();
        &self.values[(head * self.tokens + token) * dim..][..dim]
    }
}

impl Moved {
    /// Takes a prompt's layer in: the queries of its last `steps` tokens over its keys, and over those of the layer
    /// below where they are frozen.
    pub(super) fn take(
        &mut self,
        frozen: &FrozenTokens,
        [queries, keys, below]: [&Heads<'_>; 3],
        steps: usize,
    ) {
        let norm = |row: &mut dyn Iterator<Item = f64>| row.map(|x| x * x).sum::<f64>().sqrt();
        for head in 0..keys.heads {
            for token in frozen.tokens.clone() {
                let pairs = keys.row(head, token).iter().zip(below.row(head, token));
                let update = norm(&mut pairs.map(|(a, b)| f64::from(a - b)));
                self.update = self.update.max(update);
            }
        }
        let group = queries.heads / keys.heads;
        let scale = 1.0 / (keys.head_dim() as f64).sqrt();
        for head in 0..queries.heads {
            for newest in queries.tokens - steps..queries.tokens {
                let query = queries.row(head, newest);
                let length = norm(&mut query.iter().map(|x| f64::from(*x)));
                self.query_norm = self.query_norm.max(length);
                let attention = |taken: Range<usize>| {
                    let logit = |token: usize| {
                        let from = if taken.contains(&token) { below } else { keys };
                        let pairs = query.iter().zip(from.row(head / group, token));
                        pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() * scale
                    };
                    softmax((0..=newest).map(logit).collect())
                };
                let (own, other) = (attention(0..0), attention(frozen.tokens.clone()));
                let moved = own.iter().zip(&other).map(|(a, b)| (a - b).abs()).sum::<f64>() / 2.0;
                self.moved += moved;
                self.most = self.most.max(moved);
                self.queries += 1.0;
            }
        }
    }
}

/// Theorem 8, of constants that are fitted to the updates of all `layers`: a layer's bounds, where it freezes anything.
pub(super) fn means(layers: &[&Moved], head_dim: usize) -> Vec<Option<MovedMeans>> {
    let frozen = |moved: &&Moved| moved.queries > 0.0;
    let first = layers.iter().position(frozen).unwrap_or(0);
    let freezing = layers.iter().enumerate().filter(|(_, moved)| frozen(moved));
    let updates: Vec<(usize, f64)> =
        freezing.map(|(layer, moved)| (layer - first, moved.update)).collect();
    let fit = KeyDrift::fit(&updates);
    let of = |(layer, moved): (usize, &&Moved)| {
        let fit = fit.filter(|_| frozen(moved))?;
        let bound = fit.gap(moved.query_norm, head_dim, layer - first);
        let broken = moved.most > bound + super::ROUNDING;
        let moved = moved.moved / moved.queries;
        Some(MovedMeans { moved, bound: bound.min(1.0), vacuous: bound > 1.0, broken })
    };
    layers.iter().enumerate().map(of).collect()
}

fn softmax(mut logits: Vec<f64>) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    logits.iter_mut().for_each(|logit| *logit = (*logit - max).exp());
    let sum: f64 = logits.iter().sum();
    logits.iter_mut().for_each(|weight| *weight /= sum);
    logits
}

#[cfg(test)]
mod tests {
    use kv_policies::{FrozenTokens, Reuse};

    use super::{Heads, Moved, means};

    /// Two keys of one number, of which the first is frozen: attention of `ln 3` against 0 becomes even.
    #[test]
    fn what_a_frozen_key_moves() {
        let heads = |values| Heads { values, heads: 1, tokens: 2 };
        let third = 3f32.ln();
        let (queries, keys, below) = ([0.0, 1.0], [third, 0.0], [0.0, 0.0]);
        let frozen = FrozenTokens { tokens: 0..1, reuse: Reuse::KeysValues };
        let mut moved = Moved::default();
        moved.take(&frozen, [&heads(&queries), &heads(&keys), &heads(&below)], 1);
        let still = Moved::default();
        let means = means(&[&still, &moved], 1);
        assert!(means[0].is_none());
        let own = means[1].as_ref().unwrap();
        assert!((own.moved - 0.25).abs() < 1e-6, "{}", own.moved);
        // |q| |dk| = ln 3, of the only layer that freezes.
        assert!((own.bound - 1.0).abs() < 1e-6 && own.vacuous && !own.broken, "{}", own.bound);
        let small = [0.1 * third, 0.0];
        let mut moved = Moved::default();
        moved.take(&frozen, [&heads(&queries), &heads(&small), &heads(&below)], 1);
        let means = super::means(&[&moved], 1);
        let own = means[0].as_ref().unwrap();
        let expected = f64::from(0.1 * third);
        assert!((own.bound - expected).abs() < 1e-6 && own.moved < own.bound && own.moved > 0.02);
        assert!(!own.vacuous);
    }
}
