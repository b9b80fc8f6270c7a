//! Merging slots on the device, and writing weights and values of merged slots.

use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{MergeLists, MergeOptions, Merged, merge_slots, scatter_rows, scatter_scalars};

use super::expect_shape;
use crate::{LayerCache, Result};

impl LayerCache {
    /// Merges victims into kept slots, whose keys and values are written in place; see
    /// [`merge_slots`]. Victims are rows of `from`, or slots of the cache. They stay as they are,
    /// and so do weights and tracks.
    ///
    /// # Errors
    /// The errors of [`merge_slots`]; nothing is changed then.
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
    /// [`crate::Error::Shape`].
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
    /// [`crate::Error::Shape`].
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
    /// [`crate::Error::Shape`].
    pub fn add_values(&mut self, slots: &Tensor<1, Int>, rows: Tensor<2>) -> Result<()> {
        expect_shape("rows", &rows.dims(), &[slots.dims()[0], self.head_dim()])?;
        let own = self.values.clone().select(0, slots.clone().clamp_min(0)).cast(DType::F32);
        let rows = (own + rows.cast(DType::F32)).cast(self.options.dtype);
        Ok(scatter_rows(&mut self.values, slots.clone(), rows)?)
    }
}
