//! Merges during decode, and the thresholds that follow them.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{LayerCache, Selection};
use kv_kernels::{MergeLists, NO_SLOT, NearestSlotsOptions, SlotLists, nearest_slots, range_slots};

use super::{D2o, THRESHOLD};
use crate::Result;
use crate::merging::merge_groups::unprotected;
use crate::policy::sentinels::NO_THRESHOLD;

impl D2o {
    /// Merges one victim, `[B, Hkv]`, of every head over its limit, without waiting for the device.
    pub(super) fn merge_victims(
        &self,
        cache: &mut LayerCache,
        victims: &Tensor<2, Int>,
        limits: &[usize],
    ) -> Result<()> {
        let layout = cache.layout();
        let (batch, kv_heads, total_kv_heads) =
            (layout.batch(), layout.kv_heads(), layout.head_ranges());
        let lengths = layout.lengths().to_vec();
        let longest = lengths.iter().copied().max().unwrap_or_default();
        let Some(threshold) = cache.state(THRESHOLD).cloned().filter(|_| longest > 1) else {
            return Ok(());
        };
        let device = cache.options().device.clone();
        let ones = Tensor::<1, Int>::ones([total_kv_heads], (&device, DType::I32));
        // Heads within their limit have no victim.
        let over = lengths.iter().zip(limits).map(|(length, limit)| f32::from(length > limit));
        let over: Vec<f32> = over.collect();
        let uneven = over.contains(&0.0);
        // Whether every head has a victim, and another slot that it may go into.
        let alike = !uneven && lengths.iter().all(|&length| length > 1);
        let alike = alike && !self.options.spare_protected;
        let victims = victims.clone().reshape([total_kv_heads, 1]);
        let victims = if alike { victims } else { victims.clamp_min(0) };
        let of = SlotLists { slots: victims, counts: ones.clone() };
        let among = match self.options.spare_protected {
            true => self.open_slots(cache)?,
            false => all_slots(cache, longest)?,
        };
        let nearest =
            nearest_slots(cache.keys().clone(), &of, &among, NearestSlotsOptions::default())
                .map_err(kv_core::Error::from)?;
        let cosines = nearest.cosines.reshape([batch, kv_heads]);
        let cosines = if alike { cosines } else { cosines.clamp_min(-1.0) };
        let (mean, none) = if uneven {
            let over = Tensor::<1>::from_data(over.as_slice(), (&device, DType::F32));
            let over = over.reshape([batch, kv_heads]);
            let count = over.clone().sum_dim(1);
            let mean = (cosines.clone() * over).sum_dim(1) / count.clone().clamp_min(1.0);
            (mean, Some(count.equal_scalar(0.0)))
        } else {
            (cosines.clone().mean_dim(1), None)
        };
        let before: Tensor<2> = threshold.reshape([batch, 1]);
        let momentum = self.options.momentum;
        let followed =
            before.clone().mul_scalar(1.0 - momentum) + mean.clone().mul_scalar(momentum);
        let first = before.clone().lower_equal_scalar(NO_THRESHOLD);
        let mut threshold = followed.mask_where(first, mean.clone());
        if let Some(none) = none {
            threshold = threshold.mask_where(none, before);
        }
        let compared = match self.options.official {
            true => mean.expand([batch, kv_heads]),
            false => cosines.clone(),
        };
        let mut stays = compared.lower(threshold.clone().expand([batch, kv_heads]));
        cache.assign_state(THRESHOLD, threshold.reshape([batch, 1, 1]))?;
        let places = nearest.places;
        if uneven {
            let within = over.iter().map(|&over| i32::from(over == 0.0));
            let within: Vec<i32> = within.collect();
            let within = Tensor::<1, Int>::from_data(within.as_slice(), (&device, DType::I32));
            stays = stays.bool_or(within.equal_scalar(1).reshape([batch, kv_heads]));
        }
        let slots = if alike {
            among.slots.gather(1, places)
        } else {
            // Without another slot there is nothing to merge into.
            stays = stays.bool_or(places.clone().lower_elem(0).reshape([batch, kv_heads]));
            let first = cache.ranges().offsets.clone().reshape([total_kv_heads, 1]);
            among.slots.gather(1, places.clamp_min(0)).max_pair(first)
        };
        let kept = slots.clone().reshape([total_kv_heads]);
        let stays = stays.reshape([total_kv_heads, 1]);
        // Means are weighted by the sum of both logarithms, which so are a half each.
        let weigh = |scores: Tensor<2>| {
            let halves = scores.mul_scalar(0.5).reshape([total_kv_heads, 1, 1]);
            halves.expand([total_kv_heads, 1, 2])
        };
        let own = Tensor::ones([batch, kv_heads], (&device, DType::F32));
        let lists = MergeLists {
            targets: slots.zeros_like().mask_fill(stays.clone(), NO_SLOT),
            victim_weights: weigh(self.log_scores(cosines.clone())),
            victims: of,
            kept_weights: weigh(self.log_scores(own)),
            kept: SlotLists { slots, counts: ones },
        };
        cache.merge_slots(None, &lists, &Self::merging())?;
        if self.options.official {
            let factors =
                cosines.clamp_min(0.0).add_scalar(1.0).div_scalar(2.0).reshape([total_kv_heads]);
            let slots = kept.mask_fill(stays.reshape([total_kv_heads]), NO_SLOT);
            cache.scale_slots(&slots, factors)?;
        }
        Ok(())
    }

    /// Live slots that the evictor does not protect. Waits for the device.
    fn open_slots(&self, cache: &LayerCache) -> Result<SlotLists> {
        let layout = cache.layout();
        let all: Vec<Vec<u32>> =
            layout.lengths().iter().map(|&length| (0..length as u32).collect()).collect();
        let limits = cache.limits().unwrap_or(layout.lengths());
        let ends = limits.iter().map(|&slots| self.evictor.protected(slots, true));
        let open = unprotected(cache, &all, &ends.collect::<Result<Vec<_>>>()?)?;
        let offsets = layout.offsets();
        Ok(Selection::new(open)?.lists(offsets, &cache.options().device)?)
    }
}

/// All live slots of heads of up to `longest` slots.
fn all_slots(cache: &LayerCache, longest: usize) -> Result<SlotLists> {
    let ranges = cache.ranges();
    let slots = range_slots(&ranges.offsets, longest).map_err(kv_core::Error::from)?;
    let counts = ranges.lengths.clone().reshape([cache.layout().head_ranges()]);
    Ok(SlotLists { slots, counts })
}
