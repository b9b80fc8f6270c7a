//! Decode steps of a stream: tokens wait until a batch is full.

use kv_core::{LayerCache, NUMERATORS, Selection, read_f32};

use super::head::Head;
use super::sizes::Sizes;
use super::take::weights;
use super::{BalanceKvStream, norms};
use crate::Result;
use crate::sampling::balancekv::merge_reduce::{Instances, Pool, Token, bucket};

impl BalanceKvStream {
    /// Lets the stream take the oldest waiting tokens of a cache.
    pub(super) fn take_waiting(&self, cache: &mut LayerCache) -> Result<()> {
        let layout = cache.layout().clone();
        let mut heads = Head::load(cache)?;
        let positions = cache.read_positions()?;
        let values = cache.values().clone().unsqueeze::<3>().unsqueeze::<4>();
        let norms = read_f32("norms", norms(values))?;
        let denominators = cache.read_weights()?;
        let numerators = match cache.track(NUMERATORS) {
            Some(track) => read_f32("numerators", track.clone())?,
            None => denominators.clone(),
        };
        let mut instances = Vec::with_capacity(heads.len());
        let (mut new, mut waiting, mut longest) = (Vec::new(), Vec::new(), Vec::new());
        for (range, head) in heads.iter_mut().enumerate() {
            let Sizes { recents, batch, .. } = head.sizes;
            let mut own = Instances { batch, seed: head.seed, ..Default::default() };
            let mut slots: Vec<usize> = layout.live(range).collect();
            slots.sort_unstable_by_key(|&slot| positions[slot]);
            let mut rest = Vec::new();
            for slot in slots {
                let token = Token { slot: slot as u32, position: positions[slot] as u32 };
                let at = token.position as usize;
                if at >= head.waiting {
                    rest.push(token);
                } else if at >= head.stream {
                    let level = |weight: f32| weight.log2().round() as usize;
                    if denominators[slot] > 0.0 {
                        own.denominator.push(level(denominators[slot]), token);
                    }
                    if !self.joint && numerators[slot] > 0.0 {
                        let instance = own.numerators.entry(bucket(norms[slot])).or_default();
                        instance.push(level(numerators[slot]), token);
                    }
                }
            }
            let count = rest.len().saturating_sub(recents) / batch * batch;
            let behind = rest.split_off(count);
            head.waiting = match (behind.first(), rest.last()) {
                (Some(first), _) => first.position as usize,
                (None, Some(last)) => last.position as usize + 1,
                (None, None) => head.waiting,
            };
            new.push(rest.into_iter().map(|token| (token, norms[token.slot as usize])).collect());
            waiting.push(behind);
            instances.push(own);
            longest.push(head.longest);
        }
        let pool = Pool { keys: cache.keys(), values: cache.values() };
        self.take(&pool, &mut instances, &new, &mut longest)?;
        let (mut kept, mut limits) = (Vec::new(), Vec::new());
        let (mut log_weights, mut numerators) = (Vec::new(), Vec::new());
        let rows = heads.iter_mut().zip(&instances).zip(&waiting).zip(longest);
        for (range, (((head, instances), waiting), longest)) in rows.enumerate() {
            head.longest = longest;
            let mut all = weights(instances, self.joint);
            let sinks = layout.live(range).filter(|&slot| (positions[slot] as usize) < head.stream);
            all.extend(sinks.map(|slot| (slot as u32, (1.0, 1.0))));
            all.extend(waiting.iter().map(|token| (token.slot, (1.0, 1.0))));
            log_weights.extend(all.values().map(|(_, denominator)| denominator.ln()));
            numerators.extend(all.values().map(|(numerator, _)| *numerator));
            let first = layout.offsets()[range] as u32;
            let Sizes { recents, batch, .. } = head.sizes;
            limits.push(all.len() + recents + batch - waiting.len());
            kept.push(all.keys().map(|slot| slot - first).collect());
        }
        cache.retain(&Selection::new(kept)?)?;
        // The number of buckets, and so of slots, depends on the values.
        let capacities = layout.capacities().iter().zip(&limits);
        if capacities.clone().any(|(capacity, limit)| limit > capacity) {
            cache.resize(capacities.map(|(capacity, limit)| *capacity.max(limit)).collect())?;
        }
        cache.set_live_log_weights(&log_weights)?;
        if !self.joint {
            cache.set_live_track(NUMERATORS, &numerators, 1.0)?;
        }
        Head::store(&heads, cache);
        cache.set_limits(limits)?;
        Ok(())
    }
}
