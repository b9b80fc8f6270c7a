//! Merges during decode: one victim a head on the device, or many on the host.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{LayerCache, NearestOptions, Selection, StepScores, read_f32, read_i32};

use super::scores::{LOG_SAMPLES, LOG_SCORES, TRACKS, mean_queries, weigh};
use super::{KeepKv, Predictor, votes, window};
use crate::Result;
use crate::merge_groups::Groups;

impl KeepKv {
    /// Merges one victim, `[B, Hkv]`, of every head over its limit into the head's most similar slot,
    /// without waiting for the device, behind averages of a step's scores where there are any.
    pub(super) fn merge_victims(
        &self,
        cache: &mut LayerCache,
        victims: &Tensor<2, Int>,
        limits: &[usize],
        query: Tensor<3>,
        average: Option<StepScores>,
    ) -> Result<()> {
        let options = NearestOptions {
            average,
            threshold: self.options.threshold,
            epsilon: self.options.epsilon,
            queries: Some(query.cast(cache.options().dtype)),
            merge: self.merging(None),
        };
        Ok(cache.merge_nearest(TRACKS, victims, limits, &options)?)
    }

    /// `ln p` and `ln ŝ` of slots `[N]`, `[N, 2]`.
    fn weights_of(&self, cache: &LayerCache, slots: &Tensor<1, Int>) -> Tensor<2> {
        let count = slots.dims()[0];
        let of = |values: &Tensor<1>| values.clone().select(0, slots.clone());
        let zeros = || Tensor::zeros([count], (&cache.options().device, DType::F32));
        let weights = cache.log_weights().map_or_else(zeros, of);
        let scores = match (cache.track(LOG_SCORES), cache.track(LOG_SAMPLES)) {
            (Some(scores), Some(samples)) => self.add_epsilon(of(scores) - of(samples)),
            _ => zeros(),
        };
        Tensor::stack::<2>(vec![weights, scores], 1)
    }

    /// Merges all slots but the kept ones into these.
    pub(super) fn merge_others(
        &self,
        cache: &mut LayerCache,
        kept: &Selection,
        query: Tensor<3>,
    ) -> Result<()> {
        let (offsets, kv_heads) = (cache.layout().offsets().to_vec(), cache.layout().kv_heads());
        let groups = Groups::of_slots(kept.kept(), cache);
        let targets = groups.targets(cache.keys(), self.options.threshold)?;
        let slots = Tensor::<1, Int>::arange(
            0..cache.positions().dims()[0] as i64,
            (&cache.options().device, DType::I32),
        );
        let weights = read_f32("weights", self.weights_of(cache, &slots))?;
        let of = |pair: usize, at: u32| {
            let slot = offsets[pair] + at as usize;
            [weights[2 * slot], weights[2 * slot + 1]]
        };
        let options = self.merging(Some(mean_queries(query, kv_heads)));
        if let Some((slots, weights)) = groups.merge(cache, None, &targets, of, options)? {
            weigh(cache, &slots, weights)?;
        }
        if self.options.predictor == Predictor::Window {
            let weight = |slot: usize| weights[2 * slot];
            window::join(cache, &groups, &targets, weight, self.options.window)?;
        }
        votes::join(cache, &groups, &targets)
    }
}

/// All slots but one victim, `[B, Hkv]`, of every head over its limit.
pub(super) fn others(
    cache: &LayerCache,
    victims: Tensor<2, Int>,
    limits: &[usize],
) -> Result<Selection> {
    let victims = read_i32("victims", victims)?;
    let layout = cache.layout();
    let kept = victims.iter().zip(limits).enumerate().map(|(pair, (&victim, &limit))| {
        let live = layout.live(pair);
        let all = 0..live.len() as u32;
        let goes = |at: &u32| live.len() > limit && live.start + *at as usize == victim as usize;
        all.filter(|at| !goes(at)).collect()
    });
    Ok(Selection::new(kept.collect())?)
}
