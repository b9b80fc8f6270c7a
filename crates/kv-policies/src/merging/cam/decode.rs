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
        let dims = [total_kv_heads, longest];
        // A row of slots for each head; entries behind its last slot are arbitrary.
        let slots = range_slots(&cache.ranges().offsets, longest).map_err(kv_core::Error::from)?;
        let column = |values: Tensor<2, Int>| values.reshape([total_kv_heads, 1]);
        let beyond = match cache.layout().uniform_length() {
            Some(_) => None,
            None => {
                let offsets = column(cache.ranges().offsets.clone());
                let place = slots.clone() - offsets.expand(dims);
                let lengths = column(cache.ranges().lengths.clone());
                Some(place.greater_equal(lengths.expand(dims)))
            }
        };
        let slots = if beyond.is_some() { slots.clamp_max(last) } else { slots };
        let flat = slots.clone().reshape([total_kv_heads * longest]);
        // Recorded steps, where every head has a victim, upload nothing.
        let uneven = over.contains(&false);
        let victims = victims.clone().reshape([total_kv_heads]);
        let victims = if uneven { victims.clamp_min(0) } else { victims };
        let at_victims = cache.positions().clone().select(0, victims.clone());
        let at_slots = cache.positions().clone().select(0, flat.clone()).reshape(dims);
        let nearness = at_victims.reshape([total_kv_heads, 1]).expand(dims) - at_slots;
        let nearness = nearness.float().cast(DType::F32);
        let mut earlier = nearness.clone().greater_equal_scalar(0.0);
        if let Some(beyond) = beyond {
            earlier = earlier.bool_or(beyond);
        }
        let nearness = nearness.mask_fill(earlier.clone(), NO_NEARNESS);
        let spread = self.options.spread.min(longest);
        let counts = Tensor::full([total_kv_heads], spread as i32, (&device, DType::I32));
        let next = top_slots(nearness.clone(), None, Choice::Top(counts), spread)
            .map_err(kv_core::Error::from)?
            .indices;
        let nearness = nearness.gather(1, next.clone());
        let receives = nearness.clone().greater_scalar(NO_NEARNESS);
        let refuses = nearness.lower_equal_scalar(NO_NEARNESS);

        let of_slots = attention.clone().select(0, flat).reshape(dims);
        let ones = |of: Tensor<2, burn::tensor::Bool>| {
            of.float().cast(DType::F32).sum_dim(1).clamp_min(1.0)
        };
        let receivers = ones(receives);
        let compared = match self.options.official {
            true => {
                let sum = of_slots.mask_fill(earlier.clone(), 0.0).sum_dim(1);
                sum / ones(earlier.bool_not())
            }
            false => {
                let own = of_slots.gather(1, next.clone());
                own.mask_fill(refuses.clone(), 0.0).sum_dim(1) / receivers.clone()
            }
        };
        // u < A / mean, where 0 of 0 is 0.
        let own = attention.clone().select(0, victims.clone()).reshape([total_kv_heads, 1]);
        let mut stays = (uniforms.reshape([total_kv_heads, 1]) * compared).greater_equal(own);
        if uneven {
            let over: Vec<i32> = over.into_iter().map(i32::from).collect();
            let over = Tensor::<1, Int>::from_data(over.as_slice(), (&device, DType::I32));
            stays = stays.bool_or(over.equal_scalar(0).reshape([total_kv_heads, 1]));
        }
        let refuses = refuses.bool_or(stays.expand([total_kv_heads, spread]));

        let shares = match self.options.official {
            true => Tensor::full(
                [total_kv_heads, 1],
                1.0 / self.options.spread as f32,
                (&device, DType::F32),
            ),
            false => receivers.recip(),
        };
        let values = cache.values().clone().select(0, victims).cast(DType::F32) * shares;
        let head_dim = cache.head_dim();
        let rows = values.unsqueeze_dim::<3>(1).expand([total_kv_heads, spread, head_dim]);
        let slots = slots.gather(1, next).mask_fill(refuses, NO_SLOT);
        Ok(cache.add_values(
            &slots.reshape([total_kv_heads * spread]),
            rows.reshape([total_kv_heads * spread, head_dim]),
        )?)
    }
}
