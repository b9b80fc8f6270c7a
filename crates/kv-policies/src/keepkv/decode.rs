//! Merges during decode: one victim a head on the device, or many on the host.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{LayerCache, MergeLists, Selection, SlotLists, nearest_slots, read_f32};

use super::scores::{LOG_SAMPLES, LOG_SCORES, mean_queries, weigh};
use super::{KeepKv, votes};
use crate::Result;
use crate::merge_groups::Groups;

impl KeepKv {
    /// Merges one victim, `[B, Hkv]`, of every head over its limit into the head's most similar slot,
    /// without waiting for the device.
    pub(super) fn merge_slots(
        &self,
        cache: &mut LayerCache,
        victims: &Tensor<2, Int>,
        limits: &[usize],
        query: Tensor<3>,
    ) -> Result<()> {
        let layout = cache.layout();
        let (pairs, kv_heads) = (layout.pairs(), layout.kv_heads());
        let longest = layout.lengths().iter().copied().max().unwrap_or_default();
        if longest < 2 {
            return Ok(());
        }
        let device = cache.options().device.clone();
        let lengths = layout.lengths().to_vec();
        let offsets = cache.ranges().offsets.clone().reshape([pairs, 1]);
        let counts = cache.ranges().lengths.clone().reshape([pairs]);
        let place = Tensor::<1, Int>::arange(0..longest as i64, (&device, DType::I32));
        let all = offsets.clone().expand([pairs, longest])
            + place.unsqueeze_dim::<2>(0).expand([pairs, longest]);
        let ones = Tensor::<1, Int>::ones([pairs], (&device, DType::I32));
        let victims = victims.clone().reshape([pairs, 1]);
        let of = SlotLists { slots: victims.clone().clamp_min(0), counts: ones.clone() };
        let among = SlotLists { slots: all, counts };
        let nearest = nearest_slots(cache.keys().clone(), &of, &among, false)
            .map_err(kv_core::Error::from)?;
        let mut stays = nearest.cosines.lower_equal_scalar(self.options.threshold);
        if lengths.iter().zip(limits).any(|(length, limit)| length <= limit) {
            // Heads within their limit lose nothing.
            let within: Vec<i32> = lengths
                .iter()
                .zip(limits)
                .map(|(length, limit)| i32::from(length <= limit))
                .collect();
            let within = Tensor::<1, Int>::from_data(within.as_slice(), (&device, DType::I32));
            stays = stays.bool_or(within.equal_scalar(1).reshape([pairs, 1]));
        }
        let slots = offsets + nearest.places.clamp_min(0);
        let targets = slots.zeros_like().mask_fill(stays.clone(), -1);
        let kept = slots.clone().reshape([pairs]);
        let lists = MergeLists {
            victim_weights: self.weights_of(cache, &of.slots.clone().reshape([pairs])),
            victims: of,
            targets,
            kept_weights: self.weights_of(cache, &kept),
            kept: SlotLists { slots, counts: ones },
        };
        let options = self.merging(Some(mean_queries(query, kv_heads)));
        let merged = cache.merge_slots(None, &lists, &options)?;
        let written = kept.mask_fill(stays.reshape([pairs]), -1);
        weigh(cache, &written, merged.weights.reshape([pairs, 2]))?;
        votes::add(cache, &victims.reshape([pairs]), &written)
    }

    /// `ln p` and `ln ŝ` of slots `[N]`, `[N, 1, 2]`.
    fn weights_of(&self, cache: &LayerCache, slots: &Tensor<1, Int>) -> Tensor<3> {
        let count = slots.dims()[0];
        let of = |values: &Tensor<1>| values.clone().select(0, slots.clone());
        let zeros = || Tensor::zeros([count], (&cache.options().device, DType::F32));
        let weights = cache.log_weights().map_or_else(zeros, of);
        let scores = match (cache.track(LOG_SCORES), cache.track(LOG_SAMPLES)) {
            (Some(scores), Some(samples)) => self.add_epsilon(of(scores) - of(samples)),
            _ => zeros(),
        };
        Tensor::stack::<2>(vec![weights, scores], 1).unsqueeze_dim(1)
    }

    /// Merges all slots but the kept ones into these.
    pub(super) fn merge_others(
        &self,
        cache: &mut LayerCache,
        kept: &Selection,
        query: Tensor<3>,
    ) -> Result<()> {
        let layout = cache.layout();
        let (offsets, kv_heads) = (layout.offsets().to_vec(), layout.kv_heads());
        let groups = Groups::new(kept.kept(), layout.lengths());
        let targets = self.targets(groups.nearest(cache.keys(), |pair| offsets[pair])?);
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
        votes::join(cache, &groups, &targets)
    }
}
