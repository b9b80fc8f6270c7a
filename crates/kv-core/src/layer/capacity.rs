//! Pools of other capacities: growing, shrinking, batching.

use std::collections::BTreeMap;

use burn::tensor::{DType, Tensor};

use super::{StateTensor, Track, expect_shape};
use crate::layer::state::{PolicyState, States};
use crate::tensors::packed;
use crate::{Error, LayerCache, Result, SlotLayout, counted};

impl LayerCache {
    /// Moves the live slots into a new pool of other capacities (the old one is freed).
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] where a head's capacity is below its length.
    pub fn resize(&mut self, capacities: Vec<usize>) -> Result<()> {
        expect_shape("capacities", &[capacities.len()], &[self.layout.head_ranges()])?;
        let small = capacities.iter().zip(self.layout.lengths()).position(|(c, l)| c < l);
        if let Some(range) = small {
            return Err(Error::InvalidPlan {
                what: "resize",
                reason: format!(
                    "head {range} holds {}, a capacity of {} was asked for",
                    counted(self.layout.lengths()[range], "slot"),
                    capacities[range]
                ),
            });
        }
        let layout = SlotLayout::new(self.layout.kv_heads(), capacities);
        let mut resized = Self::new(layout, self.head_dim(), self.options.clone());
        resized.add_tracks_of(self);
        resized.set_lengths(self.layout.lengths().to_vec());
        if self.layout.used() > 0 {
            let slots = resized.live_slots();
            resized.copy_from(self, &self.live_slots(), &slots)?;
        }
        resized.state = std::mem::take(&mut self.state);
        resized.limits = self.limits.take();
        resized.states = std::mem::take(&mut self.states);
        *self = resized;
        self.tell_slots_moved()
    }

    /// Frees all capacity beyond the live slots and `room`.
    ///
    /// # Errors
    /// The errors of [`Self::resize`].
    pub fn shrink(&mut self, room: usize) -> Result<()> {
        self.resize(self.layout.lengths().iter().map(|length| length + room).collect())
    }

    /// Counts `tokens` free slots of every head as live, up to its limit. The slots hold zeros, or
    /// rows of dropped tokens. Measurements of long contexts need it.
    ///
    /// # Errors
    /// [`Error::CapacityExhausted`].
    pub fn assume(&mut self, tokens: usize) -> Result<()> {
        self.check_assumed(tokens)?;
        let lengths = self.assumed(tokens);
        self.fit(&lengths)?;
        self.states.live_mut().try_for_each(|state| state.assume(tokens))?;
        self.set_lengths(lengths);
        self.tell_slots_moved()
    }

    /// The lengths after [`Self::assume`] of `tokens` tokens.
    fn assumed(&self, tokens: usize) -> Vec<usize> {
        let heads = self.layout.lengths().iter().enumerate();
        let limit = |range: usize| self.limits.as_ref().map_or(usize::MAX, |limits| limits[range]);
        heads
            .map(|(range, &length)| length.max(limit(range).min(length.saturating_add(tokens))))
            .collect()
    }

    /// Checks that heads have room for [`Self::assume`].
    pub(crate) fn check_assumed(&self, tokens: usize) -> Result<()> {
        self.states.live().try_for_each(|state| state.check_room(tokens, false))?;
        self.check_fit(&self.assumed(tokens))
    }

    /// The lengths after a change by `growth`, `[B * Hkv]`.
    pub(crate) fn advanced(&self, growth: &[isize]) -> Result<Vec<usize>> {
        expect_shape("growth", &[growth.len()], &[self.layout.head_ranges()])?;
        let heads = self.layout.lengths().iter().zip(self.layout.capacities()).zip(growth);
        heads
            .enumerate()
            .map(|(range, ((&length, &capacity), &growth))| {
                let mut requested = length.saturating_add_signed(growth);
                let own = |state: &dyn PolicyState| state.lengths_of_step(range, length);
                if let Some(own) = self.states.live().find_map(own) {
                    requested = if own.within > capacity { own.within } else { own.behind };
                }
                let (sequence, head) =
                    (range / self.layout.kv_heads(), range % self.layout.kv_heads());
                if requested > capacity {
                    return Err(Error::CapacityExhausted { sequence, head, capacity, requested });
                }
                Ok(requested)
            })
            .collect()
    }

    /// Makes sure that every head can take `tokens` more.
    pub(super) fn reserve(&mut self, tokens: usize) -> Result<()> {
        let lengths: Vec<usize> = self.layout.lengths().iter().map(|l| l + tokens).collect();
        self.check_fit(&lengths)?;
        self.states.check_restored()?;
        let growable = self.options.growable;
        self.states.live_mut().try_for_each(|state| state.reserve(tokens, growable))?;
        self.fit(&lengths)
    }

    /// Tells states that every sequence has seen `tokens` more tokens.
    pub(crate) fn note_tokens(&mut self, tokens: usize) {
        self.states.live_mut().for_each(|state| state.appended(tokens));
    }

    /// Makes sure that heads of these lengths, `[B * Hkv]`, fit: a growable cache grows.
    ///
    /// # Errors
    /// [`Error::CapacityExhausted`] where a head has no room and the cache does not grow.
    pub fn fit(&mut self, lengths: &[usize]) -> Result<()> {
        self.check_fit(lengths)?;
        let heads = || lengths.iter().zip(self.layout.capacities());
        if heads().all(|(length, capacity)| length <= capacity) {
            return Ok(());
        }
        self.resize(heads().map(|(&length, capacity)| length.max(2 * capacity)).collect())
    }

    /// Refuses lengths that do not fit, unless the cache may grow.
    fn check_fit(&self, lengths: &[usize]) -> Result<()> {
        if self.options.growable { Ok(()) } else { self.check_room(lengths) }
    }

    /// Refuses lengths that do not fit.
    pub(super) fn check_room(&self, lengths: &[usize]) -> Result<()> {
        let mut heads = lengths.iter().zip(self.layout.capacities());
        match heads.position(|(length, capacity)| length > capacity) {
            Some(range) => Err(Error::CapacityExhausted {
                sequence: range / self.layout.kv_heads(),
                head: range % self.layout.kv_heads(),
                capacity: self.layout.capacities()[range],
                requested: lengths[range],
            }),
            None => Ok(()),
        }
    }

    /// Batches the sequences of several caches of one layer into one cache, with their room to
    /// decode. Where only some caches have a track or weights, the others get the track's initial
    /// value or weights of 1. State tensors are joined along their first dimension, the batch. All
    /// caches or none must have a given state tensor or policy state.
    ///
    /// # Errors
    /// [`Error`] where head counts, head dims or state do not fit.
    pub fn concat(mut parts: Vec<Self>) -> Result<Self> {
        if parts.len() == 1 {
            return Ok(parts.remove(0));
        }
        let Some(first) = parts.first() else {
            return Err(Error::InvalidPlan { what: "concat", reason: "no caches".into() });
        };
        let (kv_heads, head_dim) = (first.layout.kv_heads(), first.head_dim());
        for part in &parts {
            expect_shape(
                "keys",
                &[part.layout.kv_heads(), part.head_dim()],
                &[kv_heads, head_dim],
            )?;
        }
        let mut options = first.options.clone();
        options.weighted = parts.iter().any(|part| part.log_weights.is_some());
        let all = |of: fn(&SlotLayout) -> &[usize]| -> Vec<usize> {
            parts.iter().flat_map(|part| of(&part.layout)).copied().collect()
        };
        let capacities = all(SlotLayout::capacities);
        let none = SlotLayout::new(kv_heads, vec![0; capacities.len()]);
        let mut joined = Self::new(none, head_dim, options);
        parts.iter().for_each(|part| joined.add_tracks_of(part));
        joined.take_pools_of(&parts);
        joined.layout = SlotLayout::new(kv_heads, capacities);
        joined.set_lengths(all(SlotLayout::lengths));
        if parts.iter().any(|part| part.limits.is_some()) {
            let limits = parts.iter().flat_map(|part| match &part.limits {
                Some(limits) => limits.clone(),
                None => vec![usize::MAX; part.layout.head_ranges()],
            });
            joined.limits = Some(limits.collect());
        }
        joined.state = joined_state(&parts)?;
        let states: Vec<&States> = parts.iter().map(|part| &part.states).collect();
        joined.states = States::joined(&states)?;
        joined.tell_slots_moved()?;
        Ok(joined)
    }

    /// Takes the pools of `parts`, whose slots this cache has one behind the other, live or free.
    fn take_pools_of(&mut self, parts: &[Self]) {
        let parts: Vec<&Self> = parts.iter().filter(|part| part.layout.total() > 0).collect();
        if parts.is_empty() {
            return;
        }
        let device = &self.options.device;
        self.keys = packed(Tensor::cat(parts.iter().map(|part| part.keys.clone()).collect(), 0));
        self.values =
            packed(Tensor::cat(parts.iter().map(|part| part.values.clone()).collect(), 0));
        self.positions = Tensor::cat(parts.iter().map(|part| part.positions.clone()).collect(), 0);
        if let Some(log_weights) = &mut self.log_weights {
            let of = |part: &&Self| match &part.log_weights {
                Some(own) => own.clone(),
                None => Tensor::zeros([part.slots()], (device, DType::F32)),
            };
            *log_weights = Tensor::cat(parts.iter().map(of).collect(), 0);
        }
        for (name, track) in &mut self.tracks {
            let of = |part: &&Self| match part.tracks.get(name) {
                Some(own) => own.values.clone(),
                None => Track::new(track.initial, part.slots(), device).values,
            };
            track.values = Tensor::cat(parts.iter().map(of).collect(), 0);
        }
    }

    /// Adds the tracks of another cache, at their initial values.
    fn add_tracks_of(&mut self, other: &Self) {
        let slots = self.slots();
        for (name, track) in &other.tracks {
            let fresh = || Track::new(track.initial, slots, &self.options.device);
            self.tracks.entry(name.clone()).or_insert_with(fresh);
        }
    }
}

/// The state tensors of several caches, batched.
fn joined_state(parts: &[LayerCache]) -> Result<BTreeMap<String, StateTensor>> {
    let mut state: BTreeMap<&String, Vec<&StateTensor>> = BTreeMap::new();
    for (name, own) in parts.iter().flat_map(|part| &part.state) {
        state.entry(name).or_default().push(own);
    }
    let joined = state.into_iter().map(|(name, own)| {
        all_or_none(&format!("state `{name}`"), own.len(), parts.len())?;
        Ok((name.clone(), StateTensor::joined(name, &own)?))
    });
    joined.collect()
}

fn all_or_none(what: &str, count: usize, parts: usize) -> Result<()> {
    if count == parts {
        return Ok(());
    }
    let reason = format!("{what} is in {count} of {parts} caches");
    Err(Error::InvalidPlan { what: "concat", reason })
}
