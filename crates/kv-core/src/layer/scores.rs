//! Adding a step's attention to tracks.

use burn::tensor::{DType, Tensor};
use kv_kernels::{GroupReduction, add_contributions, add_probabilities, value_norms};

use crate::{LayerCache, Result};

impl LayerCache {
    /// Adds a step's attention probabilities to a track of live slots; see [`add_probabilities`].
    /// The step's attention must have returned logits `[S, G]` and the log-sum-exp `[B, Hq]`.
    ///
    /// # Errors
    /// [`crate::Error::InvalidPlan`] for a track that the cache does not have,
    /// [`crate::Error::Kernel`].
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

    /// [`Self::add_probabilities`] with probabilities times `‖v‖₁`, which the track `norms` has
    /// ([`Self::set_value_norms`]); see [`add_contributions`].
    ///
    /// # Errors
    /// The errors of [`Self::add_probabilities`].
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
    /// [`crate::Error::Kernel`].
    pub fn set_value_norms(&mut self, track: &str) -> Result<()> {
        self.set_track(track, value_norms(self.values.clone()), 0.0)
    }

    /// The probabilities that [`Self::add_probabilities`] adds, `[S]`, 0 for slots that are not
    /// live.
    ///
    /// # Errors
    /// [`crate::Error::Kernel`].
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
}
