//! Dropping slots, in place.

use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{KeepLists, Protected, argmin_slots, compact_slots, drop_slots, scatter_scalars};

use super::expect_shape;
use crate::tensors::ints;
use crate::{Error, LayerCache, Result, Selection};

impl LayerCache {
    /// Each head's slot of lowest score, `[B, Hkv]`; the lowest slot among equals, −1 for an empty
    /// head. `scores` is `[S]`, f32.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn lowest_slots(&self, scores: Tensor<1>) -> Result<Tensor<2, Int>> {
        expect_shape("scores", &scores.dims(), &[self.slots()])?;
        Ok(argmin_slots(scores, &self.ranges, None)?)
    }

    /// [`Self::lowest_slots`] that takes a slot of a sequence's first `sinks` or last `recents`
    /// positions only where a head has no other slot; `newest` is each sequence's newest position,
    /// `[B]`, 32-bit.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Kernel`].
    pub fn lowest_unprotected(
        &self,
        scores: Tensor<1>,
        newest: &Tensor<1, Int>,
        [sinks, recents]: [usize; 2],
    ) -> Result<Tensor<2, Int>> {
        expect_shape("scores", &scores.dims(), &[self.slots()])?;
        let [sinks, recents] =
            [sinks, recents].map(|count| i32::try_from(count).unwrap_or(i32::MAX));
        let protected = Protected { positions: &self.positions, newest, sinks, recents };
        Ok(argmin_slots(scores, &self.ranges, Some(protected))?)
    }

    /// Drops one given live slot, `[B, Hkv]`, from every head that holds more than its limit, in
    /// place and without waiting for the device: the head's last slot moves into the gap. The slots
    /// are on the device and are not checked.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for a limit of 0, [`Error::Shape`].
    pub fn evict_slots(&mut self, victims: Tensor<2, Int>, limits: &[usize]) -> Result<()> {
        let shape = [self.layout.batch(), self.layout.kv_heads()];
        expect_shape("victims", &victims.dims(), &shape)?;
        let over = self.over_limits(limits)?;
        if !over.contains(&true) {
            return Ok(());
        }
        let dropped = self.flags(&over);
        let (pool, tracks, ranges) = self.pool_and_tracks();
        let mut tracks: Vec<_> = tracks.values_mut().map(|track| &mut track.values).collect();
        drop_slots(pool, &mut tracks, ranges, &victims, &dropped)?;
        self.states.drop_void();
        for (length, over) in self.layout.lengths_mut().iter_mut().zip(over) {
            *length -= usize::from(over);
        }
        Ok(())
    }

    /// 1 for heads that hold more than their limit, 0 for others, on the device, `[B, Hkv]`.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for a limit of 0, [`Error::Shape`].
    pub fn heads_over(&self, limits: &[usize]) -> Result<Tensor<2, Int>> {
        Ok(self.flags(&self.over_limits(limits)?))
    }

    /// Which heads hold more than their limit, `[B * Hkv]`.
    fn over_limits(&self, limits: &[usize]) -> Result<Vec<bool>> {
        expect_shape("limits", &[limits.len()], &[self.layout.head_ranges()])?;
        if let Some(range) = limits.iter().position(|&limit| limit == 0) {
            return Err(Error::InvalidPlan {
                what: "eviction",
                reason: format!("the limit of head {range} is 0 slots"),
            });
        }
        let lengths = self.layout.lengths().iter().zip(limits);
        Ok(lengths.map(|(length, limit)| length > limit).collect())
    }

    /// Flags of heads on the device, `[B, Hkv]`.
    pub(super) fn flags(&self, of: &[bool]) -> Tensor<2, Int> {
        let shape = [self.layout.batch(), self.layout.kv_heads()];
        if of.contains(&false) {
            let flags: Vec<i32> = of.iter().map(|&flag| i32::from(flag)).collect();
            return ints(flags, shape, &self.options.device);
        }
        let all = || Tensor::ones(shape, (&self.options.device, DType::I32));
        self.every_head.get_or_init(all).clone()
    }

    /// Keeps the selected live slots of every head (indices count from the head's first slot) and
    /// compacts them in order, within the same pool. [`Self::resize`] gives memory back.
    ///
    /// # Errors
    /// [`Error`] where the selection does not fit.
    pub fn retain(&mut self, selection: &Selection) -> Result<()> {
        selection.check(self.layout.lengths())?;
        let lengths = selection.lengths().to_vec();
        if selection.total() > 0 {
            let shape = [self.layout.batch(), self.layout.kv_heads()];
            let (total_kv_heads, device) = (self.layout.head_ranges(), &self.options.device);
            let kept = selection.lists(&vec![0; total_kv_heads], device)?;
            let [_, most] = kept.slots.dims();
            if !self.tracks.is_empty() {
                let from = selection.lists(self.layout.offsets(), device)?.slots;
                let to = self.first_slots(&lengths)?;
                self.move_tracks(from.flatten(0, 1), to.flatten(0, 1))?;
            }
            let lists = KeepLists {
                kept: kept.slots.flatten(0, 1),
                starts: self.upload((0..total_kv_heads).map(|range| range * most)).reshape(shape),
                counts: kept.counts.reshape(shape),
                most,
            };
            let (pool, ranges) = self.pool();
            compact_slots(pool, &ranges.offsets, &lists)?;
        }
        self.states.drop_void();
        self.set_lengths(lengths);
        Ok(())
    }

    /// The `counts` live slots of each head that have the highest scores, as [`Self::retain`] takes
    /// them. Among equal scores the lower slot wins; NaN ranks last. Does not wait for the device.
    ///
    /// # Shapes
    /// `scores` `[S]`, f32; `counts` `[B * Hkv]`; a count above a head's length takes all of its
    /// slots.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Kernel`].
    pub fn highest(&self, scores: Tensor<1>, counts: &[usize]) -> Result<Selection> {
        expect_shape("scores", &scores.dims(), &[self.slots()])?;
        let total_kv_heads = self.layout.head_ranges();
        expect_shape("counts", &[counts.len()], &[total_kv_heads])?;
        let lengths = self.layout.lengths();
        let capacity = self.layout.uniform_capacity().filter(|capacity| *capacity > 0);
        let rows = match capacity {
            Some(capacity) => scores.reshape([total_kv_heads, capacity]),
            None => {
                let slots = self.first_slots(lengths)?;
                let [_, most] = slots.dims();
                scores.select(0, slots.clamp_min(0).flatten(0, 1)).reshape([total_kv_heads, most])
            }
        };
        Selection::highest_of(rows, lengths, counts)
    }

    /// Copies the tracks' values of slots `from` to slots `to`; negative slots of `to` are skipped.
    pub(super) fn move_tracks(&mut self, from: Tensor<1, Int>, to: Tensor<1, Int>) -> Result<()> {
        let from = from.clamp_min(0);
        for track in self.tracks.values_mut() {
            let values = track.values.clone().select(0, from.clone());
            scatter_scalars(&mut track.values, to.clone(), values)?;
        }
        Ok(())
    }
}
