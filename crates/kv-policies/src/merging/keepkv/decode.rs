//! Merges during decode: one victim a head in one launch, or many.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{Error, LayerCache, Selection, read_f32};
use kv_kernels::{MergingSlots, NearestOptions, SlotPool, SlotRanges, StepScores, merge_nearest};

use super::scores::{LOG_SAMPLES, LOG_SCORES, mean_queries};
use super::takes::TAKES;
use super::{KeepKv, Predictor, VOTES, VOTES_HIGH, window};
use crate::Result;
use crate::merging::merge_groups::{Groups, unprotected};

impl KeepKv {
    /// Merges one victim, `[B, Hkv]`, of every head over its limit into the head's most similar
    /// slot, without waiting for the device. The launch first adds a step's scores to the averages,
    /// where scores are given.
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
            takes: cache.track(TAKES).cloned(),
            threshold: self.options.threshold,
            epsilon: self.options.epsilon,
            queries: Some(query.cast(cache.options().dtype)),
            merge: self.merging(None),
        };
        let goes = cache.heads_over(limits)?;
        let merge = |pool: SlotPool<'_>,
                     ranges: &mut SlotRanges,
                     tracks: [&mut Tensor<1>; 4],
                     inherited: Option<&mut Tensor<1>>| {
            let SlotPool { keys, values, log_weights, .. } = pool;
            let [log_scores, log_samples, votes, votes_high] = tracks;
            let log_weights = log_weights.ok_or_else(|| Error::InvalidPlan {
                what: "merge",
                reason: "the cache has no weights".into(),
            })?;
            let slots = MergingSlots {
                keys,
                values,
                log_weights,
                log_scores,
                log_samples,
                votes,
                votes_high,
                inherited,
            };
            Ok(merge_nearest(slots, ranges, victims, &goes, &options)?)
        };
        let [scores, samples, votes, high] = [LOG_SCORES, LOG_SAMPLES, VOTES, VOTES_HIGH];
        match self.inherited() {
            None => cache
                .change_slots([scores, samples, votes, high], |pool, ranges, tracks| {
                    merge(pool, ranges, tracks, None)
                })?,
            Some(sums) => {
                let tracks = [scores, samples, votes, high, sums];
                cache.change_slots(tracks, |pool, ranges, [a, b, c, d, sums]| {
                    merge(pool, ranges, [a, b, c, d], Some(sums))
                })?;
            }
        }
        Ok(())
    }

    /// The weights of all slots, `[S, 4]`. Where merged slots inherit the evictor's scores, these
    /// are a fifth column, `[S, 5]`.
    fn weights_of(&self, cache: &LayerCache) -> Tensor<2> {
        let (slots, device) = (cache.positions().dims()[0], &cache.options().device);
        let filled = |with: f32| Tensor::full([slots], with, (device, DType::F32));
        let track = |name, initial| cache.track(name).cloned().unwrap_or_else(|| filled(initial));
        let log_weights = cache.log_weights().cloned().unwrap_or_else(|| filled(0.0));
        let scores = match (cache.track(LOG_SCORES), cache.track(LOG_SAMPLES)) {
            (Some(scores), Some(samples)) => self.add_epsilon(scores.clone() - samples.clone()),
            _ => filled(0.0),
        };
        let mut columns = vec![log_weights, scores, track(VOTES, 1.0), track(VOTES_HIGH, 0.0)];
        columns.extend(self.inherited().map(|name| track(name, 0.0)));
        Tensor::stack(columns, 1)
    }

    /// Merges all slots that are not kept into the kept ones.
    pub(super) fn merge_others(
        &self,
        cache: &mut LayerCache,
        kept: &Selection,
        query: Tensor<3>,
    ) -> Result<()> {
        let kv_heads = cache.layout().kv_heads();
        let mut groups = Groups::of_slots(kept, cache)?;
        if groups.is_empty() {
            return Ok(());
        }
        if self.options.spare_protected {
            let limits = cache.limits().unwrap_or(kept.lengths());
            let ends = limits.iter().map(|&slots| self.evictor.protected(slots, true));
            let ends = ends.collect::<Result<Vec<_>>>()?;
            groups = groups.sparing_all_but(&unprotected(cache, kept.kept()?, &ends)?);
        }
        if let Some(takes) = cache.track(TAKES) {
            let slots = groups.kept_slots().clone();
            groups = groups.taking(takes, &slots);
        }
        let targets = groups.targets(cache.keys(), self.options.threshold)?;
        let weights = self.weights_of(cache);
        if self.options.predictor == Predictor::Window {
            let [slots, _] = weights.dims();
            let log_weights = weights.clone().narrow(1, 0, 1).reshape([slots]);
            let log_weights = read_f32("weights", log_weights)?;
            window::join(cache, &groups.read(&targets)?, &log_weights, self.options.window)?;
        }
        let options = self.merging(Some(mean_queries(query, kv_heads)));
        let merged = groups.merge(cache, None, targets, groups.weights(&weights), options)?;
        self.weigh(cache, merged)
    }
}
