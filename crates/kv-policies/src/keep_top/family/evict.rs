//! Evictions during decode.

use burn::tensor::{DType, Int, Tensor};
use kv_core::LayerCache;

use super::KeepTop;
use crate::{Decoding, Eviction, Result, Scorer};

impl<S: Scorer> KeepTop<S> {
    /// Which heads evict once they hold `more` slots more, `[B * Hkv]`.
    pub(super) fn evicts(&self, cache: &LayerCache, more: usize) -> Vec<bool> {
        let heads = cache.layout().lengths().iter().zip(cache.limits().unwrap_or_default());
        let interval = self.family.interval;
        heads.map(|(&length, &limit)| length + more >= limit.saturating_add(interval)).collect()
    }

    /// What is over the limits, if it is time to evict.
    pub(super) fn due(
        &self,
        cache: &LayerCache,
        scores: impl Fn(&LayerCache) -> Result<Tensor<1>>,
        position: &Tensor<1, Int>,
    ) -> Result<Option<Eviction>> {
        let Some(limits) = cache.limits().map(<[usize]>::to_vec) else { return Ok(None) };
        let due = self.evicts(cache, 0);
        if !due.contains(&true) {
            return Ok(None);
        }
        let ends = limits.iter().map(|&limit| self.ends(limit, limit));
        let ends = ends.collect::<Result<Vec<_>>>()?;
        let window = |limit: usize| self.scorer.fitted(limit).window().min(limit);
        let sinks: Vec<usize> = ends.iter().map(|[sinks, _]| *sinks).collect();
        let recents: Vec<usize> = ends
            .iter()
            .zip(&limits)
            .map(|([_, recents], &limit)| window(limit).max(*recents))
            .collect();
        let scores = scores(cache)?;
        let ordered = matches!(self.decoding(), Decoding::Rescore { .. });
        if self.family.interval == 1 && !ordered {
            let victims = match (same(&sinks), same(&recents)) {
                (Some(sinks), Some(recents)) => {
                    cache.lowest_unprotected(scores, position, [sinks, recents])?
                }
                _ => cache.lowest_slots(protect(cache, scores, position, sinks, recents))?,
            };
            return Ok(Some(Eviction::One { victims, limits }));
        }
        // Many at once, or scores that depend on the slots' order, which stays.
        let scores = protect(cache, scores, position, sinks, recents);
        let lengths = cache.layout().lengths();
        let counts =
            (0..due.len()).map(|pair| if due[pair] { limits[pair] } else { lengths[pair] });
        Ok(Some(Eviction::KeepTop { scores, counts: counts.collect() }))
    }
}

/// Raises the scores of each head's sinks and recents beyond all others.
fn protect(
    cache: &LayerCache,
    mut scores: Tensor<1>,
    position: &Tensor<1, Int>,
    sinks: Vec<usize>,
    recents: Vec<usize>,
) -> Tensor<1> {
    let (rows, heads) = (cache.layout().batch(), cache.layout().kv_heads());
    let device = &cache.options().device;
    let of_slots = |per_head: Tensor<1, Int>| per_head.select(0, cache.slot_pairs().clone());
    let upload = |per_head: Vec<usize>| {
        let per_head: Vec<i32> =
            per_head.into_iter().map(|count| i32::try_from(count).unwrap_or(i32::MAX)).collect();
        Tensor::<1, Int>::from_data(per_head.as_slice(), (device, DType::I32))
    };
    if sinks.iter().any(|&sinks| sinks > 0) {
        let first = cache.positions().clone().lower(of_slots(upload(sinks)));
        scores = scores.mask_fill(first, f32::INFINITY);
    }
    if recents.iter().any(|&recents| recents > 0) {
        // The oldest protected position of each slot's (sequence, head).
        let now = position.clone().cast(DType::I32).unsqueeze_dim::<2>(1);
        let now = now.expand([rows, heads]).reshape([rows * heads]);
        let oldest = of_slots((now - upload(recents)).add_scalar(1));
        let recent = cache.positions().clone().greater_equal(oldest);
        scores = scores.mask_fill(recent, f32::INFINITY);
    }
    scores
}

/// What all heads have, where they have the same.
fn same(counts: &[usize]) -> Option<usize> {
    let first = *counts.first()?;
    counts.iter().all(|&count| count == first).then_some(first)
}
