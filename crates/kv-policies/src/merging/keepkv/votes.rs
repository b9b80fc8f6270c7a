//! Electoral votes: how many tokens each slot stands for, exactly.

use burn::tensor::{DType, Tensor};
use kv_core::{LayerCache, read_f32};
use kv_kernels::VOTES_RADIX;

use crate::Result;

/// Track of a slot's votes modulo 4,096, as f32 counts exactly up to 2²⁴ alone.
pub const VOTES: &str = "votes";
/// Track of a slot's votes divided by 4,096, rounded down.
pub const VOTES_HIGH: &str = "votes-high";

/// The votes of all live slots, head after head.
///
/// # Errors
/// [`kv_core::Error::Read`].
pub fn read_votes(cache: &LayerCache) -> Result<Vec<u64>> {
    let (Some(low), Some(high)) = (cache.track(VOTES), cache.track(VOTES_HIGH)) else {
        return Ok(vec![1; cache.layout().used()]);
    };
    let (low, high) = (read_f32("votes", low.clone())?, read_f32("votes", high.clone())?);
    let slots = cache.layout().live_slots();
    Ok(slots.map(|slot| low[slot] as u64 + VOTES_RADIX as u64 * high[slot] as u64).collect())
}

/// One vote for every slot.
pub(super) fn init_cache(cache: &mut LayerCache) -> Result<()> {
    let (slots, device) = (cache.positions().dims()[0], cache.options().device.clone());
    let each = |votes: f32| Tensor::full([slots], votes, (&device, DType::F32));
    cache.set_track(VOTES, each(1.0), 1.0)?;
    Ok(cache.set_track(VOTES_HIGH, each(0.0), 0.0)?)
}
