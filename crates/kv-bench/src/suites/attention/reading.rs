//! What policies that keep more than they read have read, and their certificates.

use kv_core::LayerCache;
use kv_policies::certificates::SharedStep;
use kv_policies::{LayerContext, Policy};

/// Sums over the steps of one contender in a layer.
#[derive(Clone, Copy, Default)]
pub(super) struct Reading {
    /// Attention mass of what was read, and rows that this is of.
    pub(super) mass: f64,
    pub(super) rows: f64,
    /// Certified rows.
    pub(super) certified: f64,
    /// What these dropped, and bounds on it: the paper's, where above 1 vacuous, and that of odds.
    pub(super) dropped: f64,
    pub(super) paper: f64,
    pub(super) vacuous: f64,
    pub(super) odds: f64,
    /// Rows whose dropped attention is above a bound.
    pub(super) broken: f64,
}

/// Rounding of masses in f32.
const ROUNDING: f64 = 1e-5;

impl Reading {
    /// Takes a step in; whether the policy reads less than it keeps.
    ///
    /// # Shapes
    /// `probabilities` of the full cache `[pairs * capacity, G]`, a head's tokens in order.
    ///
    /// # Errors
    /// Where the device gives nothing back.
    pub(super) fn take(
        &mut self,
        (policy, layer): (&dyn Policy, LayerContext),
        cache: &LayerCache,
        positions: &[i32],
        probabilities: &[f32],
        capacity: usize,
    ) -> anyhow::Result<bool> {
        let Some(attended) = policy.attended(layer, cache)? else { return Ok(false) };
        let layout = cache.layout();
        let group = probabilities.len() / capacity / layout.pairs();
        let each = attended.len() / layout.pairs();
        let sets = cache.index_sets().map(|sets| sets.read()).transpose()?;
        let scale = 1.0 / (cache.head_dim() as f64).sqrt();
        for (range, slots) in attended.iter().enumerate() {
            let pair = range / each;
            let first = layout.live(pair).start;
            // The queries that read this list.
            let queries = if each == 1 { 0..group } else { range % each..range % each + 1 };
            for query in queries {
                let mass: f64 = slots
                    .iter()
                    .map(|slot| {
                        let token = positions[first + slot] as usize;
                        f64::from(probabilities[(pair * capacity + token) * group + query])
                    })
                    .sum();
                self.mass += mass;
                self.rows += 1.0;
                let own = sets.as_ref().map(|sets| &sets[range]);
                let Some(own) =
                    own.filter(|own| own.retrieves == Some(false) && own.key_norm > 0.0)
                else {
                    continue;
                };
                let step = SharedStep {
                    dropped: f64::from(own.dropped),
                    distance: f64::from(own.distance),
                    key_norm: f64::from(own.key_norm),
                    scale,
                };
                let (dropped, paper) = (1.0 - mass, step.dropped_by_paper());
                self.certified += 1.0;
                self.dropped += dropped;
                self.paper += paper;
                self.vacuous += f64::from(u8::from(paper > 1.0));
                self.odds += step.dropped_by_odds();
                let least = paper.min(step.dropped_by_odds());
                self.broken += f64::from(u8::from(dropped > least + ROUNDING));
            }
        }
        Ok(true)
    }
}
