//! One victim a head at a time, without waiting for the device.

use burn::tensor::{DType, Int, Tensor};
use kv_core::LayerCache;
use kv_kernels::{Choice, NO_SLOT, range_slots, top_slots};

use super::Cam;
use crate::Result;
use crate::policy::sentinels::NO_NEARNESS;

impl Cam {
    /// Spreads one victim, `[B, Hkv]`, of every head over its limit. `attention` is `[S]`,
    /// `uniforms` `[B, Hkv]`.
    pub(super) fn spread_victims(
        &self,
        cache: &mut LayerCache,
        victims: &Tensor<2, Int>,
        limits: &[usize],
        attention: &Tensor<1>,
        uniforms: Tensor<2>,
    ) -> Result<()> {
        let layout = cache.layout();
        let total_kv_heads = layout.head_ranges();
        let lengths = layout.lengths();
        let longest = lengths.iter().copied().max().unwrap_or_default();
        let over: Vec<bool> =
            lengths.iter().zip(limits).map(|(length, limit)| length > limit).collect();
        if longest < 2 || !over.contains(&true) {
            return Ok(());
        }
        let device = cache.options().device.clone();
        let last = cache.positions().dims()[0] as i32 - 1;
        // A row of slots for each head; entries behind its last slot are arbitrary.
        let slots = range_slots(&cache.ranges().offsets, longest).map_err(kv_core::Error::from)?;
        let column = |values: Tensor<2, Int>| values.reshape([total_kv_heads, 1]);
        let offsets = column(cache.ranges().offsets.clone());
        let place = slots.clone() - offsets.expand([total_kv_heads, longest]);
        let slots = slots.clamp_max(last);
        let flat = slots.clone().reshape([total_kv_heads * longest]);
        let victims = victims.clone().reshape([total_kv_heads]).clamp_min(0);
        let at_victims = cache.positions().clone().select(0, victims.clone());
        let distances = cache.positions().clone().select(0, flat.clone());
        let distances = distances.reshape([total_kv_heads, longest])
            - at_victims.reshape([total_kv_heads, 1]).expand([total_kv_heads, longest]);
        let live = column(cache.ranges().lengths.clone()).expand([total_kv_heads, longest]);
        let later = distances.clone().greater_scalar(0).bool_and(place.lower(live));

        let nearness = distances.float().cast(DType::F32).neg();
        let nearness = nearness.mask_fill(later.clone().bool_not(), NO_NEARNESS);
        let spread = self.options.spread.min(longest);
        let counts = Tensor::full([total_kv_heads], spread as i32, (&device, DType::I32));
        let next = top_slots(nearness.clone(), None, Choice::Top(counts), spread)
            .map_err(kv_core::Error::from)?;
        let next = next.indices.clamp_min(0);
        let receives = nearness.gather(1, next.clone()).greater_scalar(NO_NEARNESS);

        let of_slots = attention.clone().select(0, flat).reshape([total_kv_heads, longest]);
        let ones = |of: Tensor<2, burn::tensor::Bool>| of.float().cast(DType::F32).sum_dim(1);
        let compared = match self.options.official {
            true => {
                of_slots.mask_fill(later.clone().bool_not(), 0.0).sum_dim(1)
                    / ones(later).clamp_min(1.0)
            }
            false => {
                let own = of_slots.gather(1, next.clone());
                let sum = own.mask_fill(receives.clone().bool_not(), 0.0).sum_dim(1);
                sum / ones(receives.clone()).clamp_min(1.0)
            }
        };
        // u < A / mean, where 0 of 0 is 0.
        let own = attention.clone().select(0, victims.clone()).reshape([total_kv_heads, 1]);
        let mut goes = (uniforms.reshape([total_kv_heads, 1]) * compared).lower(own);
        // Recorded steps, where every head has a victim, upload nothing.
        if over.contains(&false) {
            let over: Vec<i32> = over.into_iter().map(i32::from).collect();
            let over = Tensor::<1, Int>::from_data(over.as_slice(), (&device, DType::I32));
            goes = goes.bool_and(over.equal_scalar(1).reshape([total_kv_heads, 1]));
        }
        let receives = receives.bool_and(goes.expand([total_kv_heads, spread]));

        let shares = match self.options.official {
            true => Tensor::full(
                [total_kv_heads, 1],
                1.0 / self.options.spread as f32,
                (&device, DType::F32),
            ),
            false => ones(receives.clone()).clamp_min(1.0).recip(),
        };
        let values = cache.values().clone().select(0, victims).cast(DType::F32) * shares;
        let head_dim = cache.head_dim();
        let rows = values.unsqueeze_dim::<3>(1).expand([total_kv_heads, spread, head_dim]);
        let slots = slots.gather(1, next).mask_fill(receives.bool_not(), NO_SLOT);
        Ok(cache.add_values(
            &slots.reshape([total_kv_heads * spread]),
            rows.reshape([total_kv_heads * spread, head_dim]),
        )?)
    }
}
