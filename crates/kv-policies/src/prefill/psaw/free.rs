//! Slots that no later query can see. A window's start never falls, so that slots hidden from the
//! next query stay hidden.

use burn::tensor::{Int, Tensor};
use kv_core::{LayerCache, Room, Selection, read_i32};

use super::Psaw;
use crate::{LayerContext, Result};

/// The least number of slots that a head frees together while decoding: freeing waits for the
/// device and moves the other slots.
const BULK: usize = 64;
/// A head frees its length divided by this number where that is more.
const BULK_SHARE: usize = 32;

/// The number of slots that a head of `length` slots frees together.
fn bulk(length: usize) -> usize {
    BULK.max(length / BULK_SHARE)
}

impl Psaw {
    /// The end of the tokens that no query behind `tokens` tokens sees; the sinks are among them.
    fn hidden_end(&self, layer: LayerContext, tokens: usize) -> usize {
        self.share(layer).first_seen(tokens).max(self.sinks).min(tokens)
    }

    /// The tokens that stay of `tokens` tokens: all, except the tokens that are hidden from all
    /// later queries where slots are freed.
    pub fn kept(&self, layer: LayerContext, tokens: usize) -> Vec<u32> {
        let sinks = self.sinks.min(tokens);
        let end = if self.free { self.hidden_end(layer, tokens) } else { sinks };
        (0..sinks as u32).chain(end as u32..tokens as u32).collect()
    }

    /// Room for a prompt of `tokens` tokens and `new_tokens` more.
    pub fn slots(&self, layer: LayerContext, tokens: usize, new_tokens: usize) -> Room {
        if !self.free || self.share(layer).is_zero() {
            return Room::Extra(new_tokens);
        }
        // A head's length grows with the number of tokens.
        let all = tokens + new_tokens;
        let length = all + self.sinks.min(all) - self.hidden_end(layer, all);
        let kept = self.kept(layer, tokens).len();
        Room::Total((length + bulk(length)).min(kept + new_tokens))
    }

    /// Frees the slots that no later query can see, where a step has filled a head up to its limit.
    /// `newest` has the tokens' positions, `[B]`. Does nothing without `free`.
    ///
    /// # Errors
    /// [`kv_core::Error::Read`].
    pub fn free_due(
        &self,
        layer: LayerContext,
        cache: &mut LayerCache,
        newest: &Tensor<1, Int>,
    ) -> Result<()> {
        let due = cache.limits().is_some_and(|limits| {
            limits.iter().zip(cache.layout().lengths()).any(|(limit, length)| length >= limit)
        });
        if !self.free || !due {
            return Ok(());
        }
        self.free_hidden(layer, cache, &read_i32("positions", newest.clone())?)
    }

    /// Frees the slots that no later query can see, and sets the limits at which the next freeing
    /// is worth while.
    ///
    /// # Errors
    /// [`kv_core::Error::Read`].
    pub fn free_hidden(
        &self,
        layer: LayerContext,
        cache: &mut LayerCache,
        newest: &[i32],
    ) -> Result<()> {
        let share = self.share(layer);
        if !self.free || share.is_zero() {
            return Ok(());
        }
        let positions = cache.read_positions()?;
        let layout = cache.layout();
        let tokens =
            |range: usize| usize::try_from(newest[range / layout.kv_heads()] + 1).unwrap_or(0);
        let kept: Vec<Vec<u32>> = (0..layout.head_ranges())
            .map(|range| {
                let own = &positions[layout.live(range)];
                let first = share.first_seen(tokens(range)) as i32;
                // A row that has ended repeats its last position.
                let repeated = |at: usize| own.get(at + 1) == Some(&own[at]);
                let stays = |at: &usize| *at < self.sinks || (own[*at] >= first && !repeated(*at));
                (0..own.len()).filter(stays).map(|at| at as u32).collect()
            })
            .collect();
        let limits = kept.iter().enumerate().map(|(range, kept)| {
            let tokens = tokens(range);
            let end = share.first_seen(tokens).max(self.sinks).saturating_add(bulk(kept.len()));
            // From that number on, a query sees nothing before `end`.
            let number = share.reaches(end.saturating_add(1));
            let enough = number.map_or(usize::MAX, |number| number - 1);
            kept.len().saturating_add(enough.saturating_sub(tokens).max(1))
        });
        let limits = limits.collect();
        let all = kept.iter().zip(layout.lengths()).all(|(kept, &length)| kept.len() == length);
        if !all {
            cache.retain(&Selection::new(kept)?)?;
        }
        Ok(cache.set_limits(limits)?)
    }
}
