//! Caches of a fixed size, in which a new token takes the place that the step before has chosen:
//! behind the live slots, or that of the slot that mattered least.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{
    EvictingOutput, EvictionOptions, HeadLayout, HeldSlots, Placement, assign_ints,
    evicting_attention, log_norms, write_heads,
};

use super::{NUMERATORS, Track, expect_shape};
use crate::tensors::ints;
use crate::{Error, LayerCache, Result, counted};

/// The track of `ln ‖v‖₁`.
pub(crate) const LOG_NORMS: &str = "value_log_norm";

/// What a cache knows of its next tokens' places.
#[derive(Debug)]
pub(crate) struct Next {
    /// Counted from each head's first slot, `[B, Hkv]`.
    pub(crate) places: Tensor<2, Int>,
    /// The cache's limits on the device, `[B, Hkv]`.
    limits: Tensor<2, Int>,
    /// What a step's heads count their arrivals by, 0 between steps: `[B, HeldSlots::ARRIVALS]`.
    arrivals: Tensor<2, Int>,
}

/// Counters of `batch` sequences before a step.
fn no_arrivals(batch: usize, device: &Device) -> Tensor<2, Int> {
    Tensor::zeros([batch, HeldSlots::ARRIVALS], (device, DType::I32))
}

impl Next {
    pub(super) fn to_device(&self, device: &Device) -> Self {
        let (places, limits) = (self.places.clone(), self.limits.clone());
        let arrivals = no_arrivals(places.dims()[0], device);
        Self { places: places.to_device(device), limits: limits.to_device(device), arrivals }
    }
}

impl Clone for Next {
    /// A copy: places are written in place.
    fn clone(&self) -> Self {
        let [batch, _] = self.places.dims();
        Self {
            places: self.places.clone().add_scalar(0),
            limits: self.limits.clone(),
            arrivals: no_arrivals(batch, &self.places.device()),
        }
    }
}

impl LayerCache {
    /// Holds every head at its limit from now on: a new token takes the place that
    /// [`Self::attend_and_choose_victim`] has chosen before, for which each head's last slot counts
    /// as its newest token.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] without limits ([`Self::set_limits`]), where one is 0 or below what
    /// its head holds, or where numerators have weights of their own, which no such step looks at.
    pub fn enable_overwriting(&mut self) -> Result<()> {
        if self.track(NUMERATORS).is_some() {
            return Err(Error::InvalidPlan {
                what: "limits",
                reason: "numerators have weights of their own, expected one weight a slot".into(),
            });
        }
        let layout = &self.layout;
        let places = layout.lengths().iter().map(|length| length.saturating_sub(1) as i32);
        let places = places.collect();
        let shape = [layout.batch(), layout.kv_heads()];
        let places = ints(places, shape, &self.options.device);
        self.set_next(places)?;
        let norms = log_norms(self.values.clone());
        self.tracks.insert(LOG_NORMS.into(), Track { initial: 0.0, values: norms });
        Ok(())
    }

    /// Whether new tokens take places that were chosen before.
    pub fn is_overwriting(&self) -> bool {
        self.next.is_some()
    }

    /// `ln ‖v‖₁` of every slot's value, `[S]`, where the cache keeps them.
    pub fn value_log_norms(&self) -> Option<&Tensor<1>> {
        self.track(LOG_NORMS)
    }

    /// Where each head's next token goes, counted from its first slot, `[B, Hkv]`.
    pub fn write_slots_of_next(&self) -> Option<&Tensor<2, Int>> {
        self.next.as_ref().map(|next| &next.places)
    }

    /// Writes one token of every head of every sequence to its place, without waiting for the
    /// device.
    ///
    /// # Shapes
    /// `keys`, `values` `[B, Hkv, D]`; `positions` `[B]`.
    ///
    /// # Errors
    /// [`Error::CapacityExhausted`] where a head below its limit is full, [`Error::Shape`].
    pub fn overwrite(
        &mut self,
        keys: Tensor<3>,
        values: Tensor<3>,
        positions: Tensor<1, Int>,
    ) -> Result<()> {
        let (keys, values) = (keys.unsqueeze_dim(2), values.unsqueeze_dim(2));
        let positions = positions.unsqueeze_dim(1);
        self.check_tokens(&keys, &values, &positions)?;
        let lengths = self.lengths_after_step()?;
        let places = self.next()?.places.clone();
        let slots = self.ranges.offsets.clone() + places.clone();
        let mut rows = Self::token_rows(keys, values, positions);
        let norms = log_norms(rows.values.clone().cast(self.options.dtype));
        rows.tracks.insert(LOG_NORMS.into(), norms);
        let appended = places.equal(self.ranges.lengths.clone()).int().cast(DType::I32);
        self.write_slots(&slots.reshape([self.layout.pairs()]), rows)?;
        let lengths_now = self.ranges.lengths.clone() + appended;
        assign_ints(&mut self.ranges.lengths, lengths_now)?;
        self.layout.lengths_mut().copy_from_slice(&lengths);
        Ok(())
    }

    /// [`Self::overwrite`] for tokens as a layer projects them, in one launch; returns their
    /// queries, `[B, Hq, D]`.
    ///
    /// # Shapes
    /// As for [`Self::append_projected`].
    ///
    /// # Errors
    /// As [`Self::overwrite`], and those of [`write_heads`].
    pub fn overwrite_projected(
        &mut self,
        projected: Tensor<2>,
        positions: Tensor<1, Int>,
        heads: &HeadLayout,
    ) -> Result<Tensor<3>> {
        expect_shape("kv heads", &[heads.kv_heads], &[self.layout.kv_heads()])?;
        expect_shape("positions", &positions.dims(), &[self.layout.batch()])?;
        let lengths = self.lengths_after_step()?;
        let places = self.next()?.places.clone();
        let Some(mut track) = self.tracks.remove(LOG_NORMS) else {
            return Err(not_held());
        };
        let others = (!self.tracks.is_empty())
            .then(|| (self.ranges.offsets.clone() + places.clone()).reshape([self.layout.pairs()]));
        let (pool, ranges) = self.pool();
        let placement = Placement::Next { ranges, places: &places, log_norms: &mut track.values };
        let query = write_heads(projected, positions, heads, pool, placement);
        // The others' turn, while the norms are out of the way.
        let reset = others.map_or(Ok(()), |slots| self.reset_tracks(&slots));
        self.tracks.insert(LOG_NORMS.into(), track);
        let query = query?;
        reset?;
        self.layout.lengths_mut().copy_from_slice(&lengths);
        Ok(query)
    }

    /// Attention of one query per sequence over its live slots, which chooses the places of the
    /// next tokens too.
    ///
    /// # Shapes
    /// `query` `[B, Hq, D]`.
    ///
    /// # Errors
    /// See [`evicting_attention`]; [`Error::InvalidPlan`] for a cache that is not held at its
    /// limits.
    pub fn attend_and_choose_victim(
        &mut self,
        query: Tensor<3>,
        mut options: EvictionOptions,
    ) -> Result<EvictingOutput> {
        options.longest = options.longest.or(self.layout.capacities().iter().max().copied());
        let norms = self.value_log_norms().cloned().ok_or_else(not_held)?;
        let pool = [self.keys.clone(), self.values.clone()];
        let weights = self.log_weights.clone();
        let Some(next) = &mut self.next else { return Err(not_held()) };
        let limits = next.limits.clone();
        let (places, arrivals) = (&mut next.places, &mut next.arrivals);
        let held = HeldSlots { log_norms: norms, limits, places, arrivals };
        Ok(evicting_attention(query, pool, weights, &self.ranges, held, options)?)
    }

    /// Moves each head's place on by one slot, in place: behind the live slots, or, from its limit
    /// on, round to its slot `first` `[B, Hkv]`, 32-bit. So heads that are full overwrite their
    /// oldest slot behind the first ones.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for a cache that is not held at its limits, [`Error::Shape`].
    pub fn advance_write_slots(&mut self, first: Tensor<2, Int>) -> Result<()> {
        let shape = [self.layout.batch(), self.layout.kv_heads()];
        expect_shape("first", &first.dims(), &shape)?;
        let next = self.next.as_mut().ok_or_else(not_held)?;
        let moved = next.places.clone().add_scalar(1);
        let round = moved.clone().greater_equal(next.limits.clone());
        Ok(assign_ints(&mut next.places, moved.mask_where(round, first))?)
    }

    /// Sets the places, `[B, Hkv]`.
    pub(crate) fn set_next(&mut self, places: Tensor<2, Int>) -> Result<()> {
        let shape = [self.layout.batch(), self.layout.kv_heads()];
        expect_shape("places", &places.dims(), &shape)?;
        let limits = self.checked_limits()?.iter();
        let limits = limits.map(|&limit| i32::try_from(limit).unwrap_or(i32::MAX)).collect();
        let limits = ints(limits, shape, &self.options.device);
        let arrivals = no_arrivals(shape[0], &self.options.device);
        self.next = Some(Next { places, limits, arrivals });
        Ok(())
    }

    fn checked_limits(&self) -> Result<&[usize]> {
        let invalid = |reason: String| Error::InvalidPlan { what: "limits", reason };
        let limits = self.limits().ok_or_else(|| invalid("there are none".into()))?;
        let mut heads = limits.iter().zip(self.layout.lengths()).enumerate();
        match heads.find(|(_, (limit, length))| limit < length || **limit == 0) {
            Some((head, (limit, length))) => Err(invalid(format!(
                "that of head {head} is {}, expected at least {}",
                counted(*limit, "slot"),
                length.max(&1)
            ))),
            None => Ok(limits),
        }
    }

    fn next(&self) -> Result<&Next> {
        self.next.as_ref().ok_or_else(not_held)
    }

    /// The lengths after another token; heads below their limits must have room for it.
    fn lengths_after_step(&mut self) -> Result<Vec<usize>> {
        let limits = self.checked_limits()?;
        let heads = self.layout.lengths().iter().zip(limits);
        let lengths: Vec<usize> = heads.map(|(&length, &limit)| limit.min(length + 1)).collect();
        self.fit(&lengths)?;
        Ok(lengths)
    }
}

fn not_held() -> Error {
    Error::InvalidPlan { what: "step", reason: "the cache is not held at its limits".into() }
}
