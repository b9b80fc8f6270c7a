//! Tracks and limits, which policies keep beside the slots.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{SlotPool, SlotRanges, assign, scatter_scalars};

use super::expect_shape;
use crate::tensors::floats;
use crate::{Error, LayerCache, Result, Selection};

/// One policy number a slot.
#[derive(Debug)]
pub(crate) struct Track {
    /// The value of a newly appended slot.
    pub(crate) initial: f32,
    /// `[S]`
    pub(crate) values: Tensor<1>,
}

impl Track {
    /// A track of `slots` slots that all hold the initial value.
    pub(crate) fn new(initial: f32, slots: usize, device: &Device) -> Self {
        Self { initial, values: Tensor::full([slots], initial, (device, DType::F32)) }
    }
}

impl Track {
    /// Sets `slots` `[N]` to the initial value; negative ones are skipped.
    pub(super) fn reset(&mut self, slots: &Tensor<1, Int>) -> Result<()> {
        let (count, device) = (slots.dims()[0], self.values.device());
        let initial = Tensor::full([count], self.initial, (&device, DType::F32));
        Ok(scatter_scalars(&mut self.values, slots.clone(), initial)?)
    }
}

impl LayerCache {
    /// A policy's per-slot numbers, `[S]`, f32.
    pub fn track(&self, name: &str) -> Option<&Tensor<1>> {
        self.tracks.get(name).map(|track| &track.values)
    }

    /// Sets a policy's per-slot numbers, in place, creating the track if need be. `initial` is the
    /// value of a newly appended slot.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] where `values` is not `[S]`.
    pub fn set_track(&mut self, name: &str, values: Tensor<1>, initial: f32) -> Result<()> {
        expect_shape("track", &values.dims(), &[self.slots()])?;
        match self.tracks.get_mut(name) {
            Some(track) => {
                track.initial = initial;
                assign(&mut track.values, values)?;
            }
            None => drop(self.tracks.insert(name.to_string(), Track { initial, values })),
        }
        Ok(())
    }

    /// Sets a track from one value a live slot, in the order of [`crate::SlotLayout::live_slots`].
    ///
    /// # Errors
    /// [`crate::Error::Shape`] where the number of values differs from the live slots.
    pub fn set_live_track(&mut self, name: &str, live: &[f32], initial: f32) -> Result<()> {
        let values = self.spread_live(live, initial)?;
        self.set_track(name, values, initial)
    }

    /// Sets a track of a cache that holds the tokens `selection` of a prompt, from one value for
    /// each token of the prompt. Does not wait for the device.
    ///
    /// # Shapes
    /// `of` `[B * Hkv, T]`, f32.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] where the cache holds other numbers of slots,
    /// [`crate::Error::IndexOutOfRange`] for a selection of more tokens, [`crate::Error::Kernel`].
    pub fn set_kept_track(
        &mut self,
        name: &str,
        of: Tensor<2>,
        selection: &Selection,
        initial: f32,
    ) -> Result<()> {
        let [total_kv_heads, tokens] = of.dims();
        expect_shape("kept values", &[total_kv_heads], &[self.layout.head_ranges()])?;
        expect_shape("kept values", selection.lengths(), self.layout.lengths())?;
        selection.check(&vec![tokens; total_kv_heads])?;
        let device = &self.options.device;
        let mut values = Tensor::full([self.slots()], initial, (device, DType::F32));
        if selection.total() > 0 {
            let firsts: Vec<usize> = (0..total_kv_heads).map(|range| range * tokens).collect();
            let rows = selection.lists(&firsts, device)?.slots.clamp_min(0).flatten(0, 1);
            let kept = of.reshape([total_kv_heads * tokens]).select(0, rows);
            let to = self.first_slots(selection.lengths())?.flatten(0, 1);
            scatter_scalars(&mut values, to, kept)?;
        }
        self.set_track(name, values, initial)
    }

    /// Slots that the policy lets each head hold after a decode step, `[B * Hkv]`.
    pub fn limits(&self) -> Option<&[usize]> {
        self.limits.as_deref()
    }

    /// Whether all heads have one length, and this is their limit. From then on, a step that
    /// appends a token and evicts one leaves all lengths as they are.
    pub fn at_limits(&self) -> bool {
        self.layout.uniform_length().is_some() && self.limits() == Some(self.layout.lengths())
    }

    /// Sets the limits, and drops states that are void under new limits
    /// ([`crate::PolicyState::is_void_once_slots_change`]).
    ///
    /// # Errors
    /// [`crate::Error::Shape`] for another number of heads.
    pub fn set_limits(&mut self, limits: Vec<usize>) -> Result<()> {
        expect_shape("limits", &[limits.len()], &[self.layout.head_ranges()])?;
        self.limits = Some(limits);
        self.states.drop_void();
        Ok(())
    }

    /// Sets the tracks of `slots` `[N]`, 32-bit, to their initial values, except tracks that a
    /// state's own steps set. Negative slots are skipped. `slots` is not called where there is no
    /// track to reset.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn reset_tracks(&mut self, slots: impl FnOnce(&Self) -> Tensor<1, Int>) -> Result<()> {
        let own = |name: &String| !self.states.set_track(name);
        if !self.tracks.keys().any(own) {
            return Ok(());
        }
        let slots = slots(self);
        let states = &self.states;
        let mut tracks = self.tracks.iter_mut().filter(|(name, _)| !states.set_track(name));
        tracks.try_for_each(|(_, track)| track.reset(&slots))
    }

    /// Spreads one value a live slot over all slots, `[S]`; other slots get `elsewhere`.
    pub(super) fn spread_live(&self, live: &[f32], elsewhere: f32) -> Result<Tensor<1>> {
        expect_shape("live values", &[live.len()], &[self.layout.used()])?;
        let mut values = vec![elsewhere; self.slots()];
        for (slot, value) in self.layout.live_slots().zip(live) {
            values[slot] = *value;
        }
        let slots = values.len();
        Ok(floats(values, [slots], &self.options.device))
    }

    /// Calls `change`, a policy's kernel, with the pool, the head ranges and the tracks `tracks`,
    /// `[S]` each, which it changes in place. If it changes lengths, [`Self::set_host_lengths`]
    /// must tell the host.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for tracks that the cache does not have; the errors of `change`.
    pub fn change_slots<const N: usize>(
        &mut self,
        tracks: [&str; N],
        change: impl FnOnce(SlotPool<'_>, &mut SlotRanges, [&mut Tensor<1>; N]) -> Result<()>,
    ) -> Result<()> {
        self.with_tracks(tracks, |cache, tracks| {
            let (pool, ranges) = cache.pool();
            change(pool, ranges, tracks.map(|track| &mut track.values))
        })
    }

    /// Tells the host how many slots of each head are live, `[B * Hkv]`, after a kernel has changed
    /// it on the device.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of heads, [`Error::CapacityExhausted`] for more slots
    /// than a head has room for.
    pub fn set_host_lengths(&mut self, lengths: &[usize]) -> Result<()> {
        expect_shape("lengths", &[lengths.len()], &[self.layout.head_ranges()])?;
        self.check_room(lengths)?;
        self.layout.lengths_mut().copy_from_slice(lengths);
        Ok(())
    }

    /// Calls `change` with tracks taken out, which are put back whatever it returns.
    pub(super) fn with_tracks<const N: usize>(
        &mut self,
        names: [&str; N],
        change: impl FnOnce(&mut Self, [&mut Track; N]) -> Result<()>,
    ) -> Result<()> {
        if let Some(name) = names.iter().find(|name| !self.tracks.contains_key(**name)) {
            let reason = format!("the cache has no track `{name}`");
            return Err(Error::InvalidPlan { what: "track", reason });
        }
        let mut taken: Vec<(String, Track)> =
            names.iter().filter_map(|name| self.tracks.remove_entry(*name)).collect();
        let mut tracks = taken.iter_mut().map(|(_, track)| track);
        let tracks: [Option<&mut Track>; N] = std::array::from_fn(|_| tracks.next());
        let result = match tracks.into_iter().collect::<Option<Vec<_>>>().map(TryInto::try_into) {
            Some(Ok(tracks)) => change(self, tracks),
            // Only where a name is given twice.
            _ => Err(Error::InvalidPlan { what: "track", reason: "a track twice".into() }),
        };
        self.tracks.extend(taken);
        result
    }

    /// Sets a track of `slots` `[N]`, in place; negative slots are skipped.
    ///
    /// # Errors
    /// [`Error::Shape`], and [`Error::InvalidPlan`] for a track that the cache does not have.
    pub fn write_track(
        &mut self,
        name: &str,
        slots: &Tensor<1, Int>,
        values: Tensor<1>,
    ) -> Result<()> {
        expect_shape("track", &values.dims(), &slots.dims())?;
        let missing = || Error::InvalidPlan {
            what: "track",
            reason: format!("the cache has no track `{name}`"),
        };
        let track = self.tracks.get_mut(name).ok_or_else(missing)?;
        Ok(scatter_scalars(&mut track.values, slots.clone(), values)?)
    }
}
