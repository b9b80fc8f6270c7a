//! The last scores of every slot, for their mean as the authors' code has it: one track a query,
//! the newest first. They are merged on the host.

use std::collections::BTreeMap;

use burn::tensor::{DType, Tensor};
use kv_core::{LayerCache, read_f32};

use super::KeepKv;
use super::scores::{LOG_SAMPLES, LOG_SCORES, log_mean};
use crate::Result;
use crate::merging::merge_groups::Read;
use crate::policy::sentinels::{LOG_OF_NO_SCORE, SCORELESS_LOG};

/// Track of the logarithms of the scores that the `age`-th last query gave.
fn track(age: usize) -> String {
    format!("log-score-{age}")
}

/// Whether a query gave a slot a score: tokens behind it got none.
fn seen(log_score: f32) -> bool {
    log_score > SCORELESS_LOG
}

/// A merged slot's score from one query: the weighted mean, if the slot's own token has a score.
fn averaged(own: [f32; 2], victims: impl Iterator<Item = [f32; 2]>) -> f32 {
    if !seen(own[1]) {
        return LOG_OF_NO_SCORE;
    }
    let all: Vec<[f64; 2]> =
        std::iter::once(own).chain(victims).map(|x| x.map(f64::from)).collect();
    let top = all.iter().map(|x| x[0] + x[1]).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = all.iter().map(|x| (x[0] + x[1] - top).exp()).sum();
    let weight: f64 = all.iter().map(|x| x[0].exp()).sum();
    (top + sum.ln() - weight.ln()) as f32
}

/// Victims by the index of the kept token that they go into.
fn by_target(victims: &[u32], targets: &[i32]) -> BTreeMap<usize, Vec<u32>> {
    let mut groups: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for (&victim, &target) in victims.iter().zip(targets) {
        if let Ok(target) = usize::try_from(target) {
            groups.entry(target).or_default().push(victim);
        }
    }
    groups
}

/// Sets the tracks from a prompt's scores, `[B * Hkv, W, T]`.
pub(super) fn init_cache(
    cache: &mut LayerCache,
    merges: &Read<'_>,
    scores: &Tensor<3>,
    window: usize,
) -> Result<()> {
    let [total_kv_heads, queries, tokens] = scores.dims();
    let scores = read_f32("scores", scores.clone())?;
    let score = |range: usize, query: usize, token: u32| {
        let score = scores[(range * queries + query) * tokens + token as usize];
        // −∞ where the query does not see the token.
        score.max(LOG_OF_NO_SCORE)
    };
    let Read { kept, victims, targets } = merges;
    let joins: Vec<BTreeMap<usize, Vec<u32>>> =
        victims.iter().zip(targets).map(|(own, targets)| by_target(own, targets)).collect();
    for age in 0..window {
        let Some(query) = queries.checked_sub(age + 1) else {
            let none = vec![LOG_OF_NO_SCORE; kept.iter().map(Vec::len).sum()];
            cache.set_live_track(&track(age), &none, LOG_OF_NO_SCORE)?;
            continue;
        };
        let live = (0..total_kv_heads).flat_map(|range| {
            let (joins, score) = (&joins[range], &score);
            kept[range].iter().enumerate().map(move |(target, &token)| {
                let victims = joins.get(&target).into_iter().flatten();
                let victims = victims.map(|&victim| [0.0, score(range, query, victim)]);
                averaged([0.0, score(range, query, token)], victims)
            })
        });
        cache.set_live_track(&track(age), &live.collect::<Vec<f32>>(), LOG_OF_NO_SCORE)?;
    }
    Ok(())
}

/// Merges the slots' scores from each query. `log_weights` is `ln p` of every slot.
pub(super) fn join(
    cache: &mut LayerCache,
    merges: &Read<'_>,
    log_weights: &[f32],
    window: usize,
) -> Result<()> {
    let offsets = cache.layout().offsets().to_vec();
    for age in 0..window {
        let name = track(age);
        let Some(values) = cache.track(&name) else { continue };
        let mut values = read_f32("scores", values.clone())?;
        for (range, targets) in merges.targets.iter().enumerate() {
            for (target, victims) in by_target(&merges.victims[range], targets) {
                let slot = |at: u32| offsets[range] + at as usize;
                let own = slot(merges.kept[range][target]);
                let of = |slot: usize| [log_weights[slot], values[slot]];
                let merged = averaged(of(own), victims.into_iter().map(|at| of(slot(at))));
                values[own] = merged;
            }
        }
        let device = cache.options().device.clone();
        let values = Tensor::<1>::from_data(values.as_slice(), (&device, DType::F32));
        cache.set_track(&name, values, LOG_OF_NO_SCORE)?;
    }
    Ok(())
}

impl KeepKv {
    /// Puts a step's scores into the window in place of the oldest, and the window's mean into the
    /// averages.
    pub(super) fn observe_window(&self, cache: &mut LayerCache, logits: &Tensor<2>) -> Result<()> {
        let window = self.options.window;
        for age in (1..window).rev() {
            if let Some(newer) = cache.track(&track(age - 1)).cloned() {
                cache.set_track(&track(age), newer, LOG_OF_NO_SCORE)?;
            }
        }
        let now = log_mean(logits.clone(), 1).squeeze_dim::<1>(1);
        let now = match cache.log_weights() {
            Some(weights) => now - weights.clone(),
            None => now,
        };
        cache.set_track(&track(0), now, LOG_OF_NO_SCORE)?;
        let all = (0..window).filter_map(|age| cache.track(&track(age)).cloned());
        let all = Tensor::stack::<2>(all.collect::<Vec<_>>(), 1);
        let sums = log_mean(all.clone(), 1).add_scalar((window as f64).ln());
        let count = all.greater_scalar(SCORELESS_LOG).float().cast(DType::F32).sum_dim(1);
        cache.set_track(LOG_SCORES, sums.squeeze_dim(1), LOG_OF_NO_SCORE)?;
        Ok(cache.set_track(
            LOG_SAMPLES,
            count.clamp_min(1.0).log().squeeze_dim(1),
            LOG_OF_NO_SCORE,
        )?)
    }
}
