//! Evictions during decode.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{LayerCache, Selection, read_f32, top};

use super::KeepTop;
use crate::{Decoding, Due, Result, Scorer};

impl<S: Scorer> KeepTop<S> {
    /// What is over the limits, if it is time to evict.
    pub(super) fn due(
        &self,
        cache: &LayerCache,
        scores: impl Fn(&LayerCache) -> Result<Tensor<1>>,
        position: &Tensor<1, Int>,
    ) -> Result<Option<Due>> {
        let Some(limits) = cache.limits().map(<[usize]>::to_vec) else { return Ok(None) };
        let interval = self.family.interval;
        let due: Vec<bool> = cache
            .layout()
            .lengths()
            .iter()
            .zip(&limits)
            .map(|(&length, &limit)| length >= limit.saturating_add(interval))
            .collect();
        if !due.contains(&true) {
            return Ok(None);
        }
        let scores = self.protect(cache, scores(cache)?, position, &limits);
        let ordered = matches!(self.decoding(), Decoding::Rescore { .. });
        if interval == 1 && !ordered {
            return Ok(Some(Due::Lowest { scores, limits }));
        }
        // Many at once, or scores that depend on the slots' order: chosen on the host.
        let scores = read_f32("scores", scores)?;
        let kept = due.iter().enumerate().map(|(pair, due)| {
            let live = &scores[cache.layout().live(pair)];
            if *due { top(live, limits[pair]) } else { (0..live.len() as u32).collect() }
        });
        Ok(Some(Due::Others(Selection::new(kept.collect())?)))
    }

    /// Raises the scores of sinks and recents beyond all others.
    fn protect(
        &self,
        cache: &LayerCache,
        scores: Tensor<1>,
        position: &Tensor<1, Int>,
        limits: &[usize],
    ) -> Tensor<1> {
        let sinks: Vec<usize> =
            limits.iter().map(|&limit| self.family.sinks_of::<S>(limit)).collect();
        let recents: Vec<usize> = limits
            .iter()
            .map(|&limit| self.family.recents_of(limit).max(self.window(limit)))
            .collect();
        let mut scores = scores;
        let device = &cache.options().device;
        let of_slots = |per_head: Vec<usize>| {
            let per_head: Vec<i32> =
                per_head.into_iter().map(|count| count.min(i32::MAX as usize) as i32).collect();
            Tensor::<1, Int>::from_data(per_head.as_slice(), (device, DType::I32))
        };
        if sinks.iter().any(|&sinks| sinks > 0) {
            let positions = cache.positions().clone();
            let first = match same(&sinks) {
                Some(sinks) => positions.lower_scalar(sinks),
                None => positions.lower(of_slots(sinks).select(0, cache.slot_pairs().clone())),
            };
            scores = scores.mask_fill(first, f32::INFINITY);
        }
        if recents.iter().any(|&recents| recents > 0) {
            // The oldest protected position of each slot's (sequence, head).
            let rows = cache.layout().batch();
            let heads = cache.layout().kv_heads();
            let now = position.clone().cast(DType::I32).unsqueeze_dim::<2>(1);
            let now = now.expand([rows, heads]).reshape([rows * heads]);
            let oldest = match same(&recents) {
                Some(recents) => now.sub_scalar(recents),
                None => now - of_slots(recents),
            };
            let oldest = oldest.add_scalar(1).select(0, cache.slot_pairs().clone());
            let recent = cache.positions().clone().greater_equal(oldest);
            scores = scores.mask_fill(recent, f32::INFINITY);
        }
        scores
    }
}

/// What all heads have, where they have the same: no upload then.
fn same(counts: &[usize]) -> Option<i32> {
    let first = *counts.first()?;
    counts.iter().all(|&count| count == first).then(|| first.min(i32::MAX as usize) as i32)
}
