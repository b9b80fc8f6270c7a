//! Electoral votes: how many tokens each slot stands for, exactly.

use kv_core::{LayerCache, VOTES_RADIX, read_f32};

use crate::Result;
use crate::merge_groups::Groups;

/// Track of a slot's votes modulo 4,096, as f32 counts exactly up to 2²⁴ alone.
pub const VOTES: &str = "votes";
/// Track of 4,096s of a slot's votes.
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

/// Counts what goes into each kept token of a prompt.
pub(super) fn prime(cache: &mut LayerCache, groups: &Groups, targets: &[Vec<i32>]) -> Result<()> {
    let mut votes = Vec::new();
    for (kept, targets) in groups.kept.iter().zip(targets) {
        let mut own = vec![1u64; kept.len()];
        for &target in targets {
            if let Some(own) = usize::try_from(target).ok().and_then(|at| own.get_mut(at)) {
                *own += 1;
            }
        }
        votes.extend(own);
    }
    write(cache, &votes)
}

/// Adds the votes of many victims to those of their targets, on the host.
pub(super) fn join(cache: &mut LayerCache, groups: &Groups, targets: &[Vec<i32>]) -> Result<()> {
    let mut votes = read_votes(cache)?;
    let mut start = 0;
    let lengths = cache.layout().lengths().to_vec();
    for (pair, targets) in targets.iter().enumerate() {
        let own = &mut votes[start..start + lengths[pair]];
        for (&victim, &target) in groups.victims[pair].iter().zip(targets) {
            if let Ok(target) = usize::try_from(target) {
                own[groups.kept[pair][target] as usize] += own[victim as usize];
            }
        }
        start += lengths[pair];
    }
    write(cache, &votes)
}

fn write(cache: &mut LayerCache, votes: &[u64]) -> Result<()> {
    let radix = VOTES_RADIX as u64;
    let low: Vec<f32> = votes.iter().map(|votes| (votes % radix) as f32).collect();
    let high: Vec<f32> = votes.iter().map(|votes| (votes / radix) as f32).collect();
    cache.set_live_track(VOTES, &low, 1.0)?;
    Ok(cache.set_live_track(VOTES_HIGH, &high, 0.0)?)
}
