//! What policies keep beside the slots: tracks, state tensors, limits.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{assign, scatter_scalars};

use super::expect_shape;
use crate::tensors::floats;
use crate::{LayerCache, Result, Selection};

/// One policy number a slot.
#[derive(Debug)]
pub(crate) struct Track {
    /// What a newly appended slot starts with.
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

    /// Sets a policy's per-slot numbers, in place, creating the track if need be. `initial` is what
    /// a newly appended slot starts with.
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

    /// Sets a track from one value a live slot, in the order of [`crate::SlotLayout::live`] over
    /// all pairs.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] where the number of values differs from the live slots.
    pub fn set_live_track(&mut self, name: &str, live: &[f32], initial: f32) -> Result<()> {
        let values = self.spread_live(live, initial)?;
        self.set_track(name, values, initial)
    }

    /// Sets a track from one value a token of a prompt, of which the cache holds what `selection`
    /// kept. Does not wait for the device.
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
        let [pairs, tokens] = of.dims();
        expect_shape("kept values", &[pairs], &[self.layout.pairs()])?;
        expect_shape("kept values", selection.lengths(), self.layout.lengths())?;
        selection.check(&vec![tokens; pairs])?;
        let device = &self.options.device;
        let mut values = Tensor::full([self.slots()], initial, (device, DType::F32));
        if selection.total() > 0 {
            let firsts: Vec<usize> = (0..pairs).map(|pair| pair * tokens).collect();
            let rows = selection.lists(&firsts, device)?.slots.clamp_min(0).flatten(0, 1);
            let kept = of.reshape([pairs * tokens]).select(0, rows);
            let to = self.first_slots(selection.lengths())?.flatten(0, 1);
            scatter_scalars(&mut values, to, kept)?;
        }
        self.set_track(name, values, initial)
    }

    /// A tensor that belongs to the policy's state of this layer.
    pub fn state(&self, name: &str) -> Option<&Tensor<3>> {
        self.state.get(name)
    }

    /// Stores a state tensor.
    pub fn set_state(&mut self, name: &str, tensor: Tensor<3>) {
        self.state.insert(name.to_string(), tensor);
    }

    /// Overwrites a state tensor in its own buffer, as recorded steps must.
    ///
    /// # Errors
    /// [`crate::Error::InvalidPlan`] where there is none, [`crate::Error::Kernel`] for one of
    /// another shape or dtype.
    pub fn assign_state(&mut self, name: &str, tensor: Tensor<3>) -> Result<()> {
        let held = self.state.get_mut(name).ok_or_else(|| crate::Error::InvalidPlan {
            what: "state",
            reason: format!("the cache has no state `{name}`"),
        })?;
        Ok(assign(held, tensor)?)
    }

    /// Slots that the policy lets each head hold after a decode step, `[B * Hkv]`.
    pub fn limits(&self) -> Option<&[usize]> {
        self.limits.as_deref()
    }

    /// Whether all heads are alike and hold as many slots as their limits let them: from then on, a
    /// step that appends a token and evicts one leaves all lengths as they are.
    pub fn at_limits(&self) -> bool {
        self.layout.uniform_length().is_some() && self.limits() == Some(self.layout.lengths())
    }

    /// Sets the limits; a cache that was held at others no longer is.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] for another number of heads.
    pub fn set_limits(&mut self, limits: Vec<usize>) -> Result<()> {
        expect_shape("limits", &[limits.len()], &[self.layout.pairs()])?;
        self.limits = Some(limits);
        // Places were chosen under other limits.
        self.next = None;
        Ok(())
    }

    /// Sets all tracks of `slots` `[N]` to their initial values; negative slots are skipped.
    pub(super) fn reset_tracks(&mut self, slots: &Tensor<1, Int>) -> Result<()> {
        self.tracks.values_mut().try_for_each(|track| track.reset(slots))
    }

    /// One value a live slot as one value a slot.
    pub(super) fn spread_live(&self, live: &[f32], elsewhere: f32) -> Result<Tensor<1>> {
        expect_shape("live values", &[live.len()], &[self.layout.used()])?;
        let mut values = vec![elsewhere; self.slots()];
        for (slot, value) in self.layout.live_slots().zip(live) {
            values[slot] = *value;
        }
        let slots = values.len();
        Ok(floats(values, [slots], &self.options.device))
    }
}
