//! Merging slots on the device, and writing what single slots carry.

use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{
    AverageWeights, GroupReduction, MergeLists, MergeOptions, Merged, MergingSlots, NearestOptions,
    SlotPool, SlotRanges, add_contributions, add_probabilities, average_scores, merge_nearest,
    merge_slots, scatter_rows, scatter_scalars, value_norms,
};

use super::{Track, expect_shape};
use crate::{Error, LayerCache, Result};

/// Names of the tracks that merging steps read and write; see [`kv_kernels::MergingSlots`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoreTracks {
    /// Logarithms of summed scores.
    pub scores: &'static str,
    /// Logarithms of what these are divided by.
    pub samples: &'static str,
    /// Tokens a slot stands for, modulo 4,096.
    pub votes: &'static str,
    /// 4,096s of them.
    pub votes_high: &'static str,
}

impl LayerCache {
    /// Takes a step's logits `[S, G]`, with the slots' log-weights in them, into the averages; see
    /// [`average_scores`].
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for tracks that the cache does not have, [`Error::Kernel`].
    pub fn average_scores(
        &mut self,
        tracks: ScoreTracks,
        logits: Tensor<2>,
        weights: AverageWeights,
    ) -> Result<()> {
        let log_weights = self.log_weights.clone();
        self.with_tracks([tracks.scores, tracks.samples], |_, [scores, samples]| {
            let (scores, samples) = (&mut scores.values, &mut samples.values);
            Ok(average_scores(scores, samples, logits, log_weights, weights)?)
        })
    }

    /// Adds the probabilities of a step's attention, which asked for logits `[S, G]` and the
    /// log-sum-exp `[B, Hq]`, to a track of its live slots; see [`add_probabilities`].
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for a track that the cache does not have, [`Error::Kernel`].
    pub fn add_probabilities(
        &mut self,
        track: &str,
        logits: Tensor<2>,
        log_sum_exp: Tensor<2>,
        reduction: GroupReduction,
    ) -> Result<()> {
        self.with_tracks([track], |cache, [sums]| {
            let ranges = &cache.ranges;
            Ok(add_probabilities(&mut sums.values, logits, log_sum_exp, ranges, reduction)?)
        })
    }

    /// [`Self::add_probabilities`] of probabilities times norms of values, which a track of their
    /// own has ([`Self::set_value_norms`]); see [`add_contributions`].
    ///
    /// # Errors
    /// As [`Self::add_probabilities`].
    pub fn add_contributions(
        &mut self,
        [sums, norms]: [&str; 2],
        logits: Tensor<2>,
        log_sum_exp: Tensor<2>,
        reduction: GroupReduction,
    ) -> Result<()> {
        self.with_tracks([sums, norms], |cache, [sums, norms]| {
            let tracks = (&mut sums.values, &mut norms.values);
            let (values, ranges) = (&cache.values, &cache.ranges);
            Ok(add_contributions(
                tracks.0,
                tracks.1,
                values,
                logits,
                log_sum_exp,
                ranges,
                reduction,
            )?)
        })
    }

    /// Sets a track to `‖v‖₁` of every slot's value.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn set_value_norms(&mut self, track: &str) -> Result<()> {
        self.set_track(track, value_norms(self.values.clone()), 0.0)
    }

    /// The probabilities that [`Self::add_probabilities`] adds, `[S]`, 0 for slots that are not
    /// live.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn probabilities(
        &self,
        logits: Tensor<2>,
        log_sum_exp: Tensor<2>,
        reduction: GroupReduction,
    ) -> Result<Tensor<1>> {
        let mut sums = Tensor::zeros([self.slots()], (&self.options.device, DType::F32));
        add_probabilities(&mut sums, logits, log_sum_exp, &self.ranges, reduction)?;
        Ok(sums)
    }

    /// Merges one victim a head, `[B, Hkv]`, of the heads that hold more than their limit, into the
    /// most similar slot, in place and without waiting for the device, behind a step's averages
    /// where the options have them; see [`merge_nearest`]. [`Self::evict_slots`] then drops the
    /// victims.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for tracks or weights that the cache does not have, [`Error::Shape`],
    /// [`Error::Kernel`].
    pub fn merge_nearest(
        &mut self,
        tracks: ScoreTracks,
        victims: &Tensor<2, Int>,
        limits: &[usize],
        options: &NearestOptions,
    ) -> Result<()> {
        let goes = self.flags(&self.over_limits(limits)?);
        let ScoreTracks { scores, samples, votes, votes_high } = tracks;
        let names = [scores, samples, votes, votes_high];
        self.with_tracks(names, |cache, [scores, samples, votes, votes_high]| {
            let log_weights = cache.log_weights.as_mut().ok_or_else(|| Error::InvalidPlan {
                what: "merge",
                reason: "the cache has no weights".into(),
            })?;
            let slots = MergingSlots {
                keys: &mut cache.keys,
                values: &mut cache.values,
                log_weights,
                log_scores: &mut scores.values,
                log_samples: &mut samples.values,
                votes: &mut votes.values,
                votes_high: &mut votes_high.values,
            };
            Ok(merge_nearest(slots, &cache.ranges, victims, &goes, options)?)
        })
    }

    /// Gives a kernel of a policy the slots and some tracks, `[S]` each, to be changed in place.
    /// Where the kernel changes how many slots are live, [`Self::set_host_lengths`] tells the host.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for tracks that the cache does not have; those of `change`.
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
        expect_shape("lengths", &[lengths.len()], &[self.layout.pairs()])?;
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

    /// Merges victims, rows of `from` or slots of the cache itself, into kept slots, whose keys and
    /// values are written in place; see [`merge_slots`]. Weights and tracks stay as they are, and
    /// so do victims.
    ///
    /// # Errors
    /// Those of [`merge_slots`]; nothing is changed then.
    pub fn merge_slots(
        &mut self,
        from: Option<[&Tensor<2>; 2]>,
        lists: &MergeLists,
        options: &MergeOptions,
    ) -> Result<Merged> {
        Ok(merge_slots(from, [&mut self.keys, &mut self.values], lists, options)?)
    }

    /// Sets the log-weights of `slots` `[N]`, in place; negative slots are skipped.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn write_log_weights(
        &mut self,
        slots: &Tensor<1, Int>,
        log_weights: Tensor<1>,
    ) -> Result<()> {
        expect_shape("log_weights", &log_weights.dims(), &slots.dims())?;
        if self.log_weights.is_none() {
            let all = Tensor::zeros([self.slots()], (&self.options.device, DType::F32));
            self.set_log_weights(all)?;
        }
        match &mut self.log_weights {
            Some(pool) => Ok(scatter_scalars(pool, slots.clone(), log_weights)?),
            None => Ok(()),
        }
    }

    /// Multiplies keys and values of `slots` `[N]`, in place; negative slots are skipped. `factors`
    /// is `[N]`, f32.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn scale_slots(&mut self, slots: &Tensor<1, Int>, factors: Tensor<1>) -> Result<()> {
        expect_shape("factors", &factors.dims(), &slots.dims())?;
        let (read, factors) = (slots.clone().clamp_min(0), factors.unsqueeze_dim::<2>(1));
        let dtype = self.options.dtype;
        for pool in [&mut self.keys, &mut self.values] {
            let rows = pool.clone().select(0, read.clone()).cast(DType::F32) * factors.clone();
            scatter_rows(pool, slots.clone(), rows.cast(dtype))?;
        }
        Ok(())
    }

    /// Adds `rows` `[N, D]` to the values of `slots` `[N]`, none of them twice, in place; negative
    /// slots are skipped. Sums are rounded once.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn add_values(&mut self, slots: &Tensor<1, Int>, rows: Tensor<2>) -> Result<()> {
        expect_shape("rows", &rows.dims(), &[slots.dims()[0], self.head_dim()])?;
        let own = self.values.clone().select(0, slots.clone().clamp_min(0)).cast(DType::F32);
        let rows = (own + rows.cast(DType::F32)).cast(self.options.dtype);
        Ok(scatter_rows(&mut self.values, slots.clone(), rows)?)
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
