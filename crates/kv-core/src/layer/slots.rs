//! Reading, writing and copying the rows of slots.

use std::collections::BTreeMap;

use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{
    SlotPool, SlotRanges, SlotSource, copy_slots, scatter_ints, scatter_rows, scatter_scalars,
};

use super::{Track, expect_shape};
use crate::tensors::{columns, ints, listed};
use crate::{Error, LayerCache, Result};

/// The rows of `N` slots.
#[derive(Debug)]
pub(crate) struct Rows {
    /// `[N, D]`
    pub(crate) keys: Tensor<2>,
    /// `[N, D]`
    pub(crate) values: Tensor<2>,
    /// `[N]`
    pub(crate) positions: Tensor<1, Int>,
    /// `[N]`; `None` where all weights are 1.
    pub(crate) log_weights: Option<Tensor<1>>,
    /// `[N]` each; a track that is not here has its initial value.
    pub(crate) tracks: BTreeMap<String, Tensor<1>>,
}

impl Rows {
    /// New tokens: weight 1, tracks at their initial value.
    pub(super) fn new(keys: Tensor<2>, values: Tensor<2>, positions: Tensor<1, Int>) -> Self {
        Self { keys, values, positions, log_weights: None, tracks: BTreeMap::new() }
    }
}

impl LayerCache {
    /// Copies the rows of `slots`.
    pub(crate) fn read_slots(&self, slots: &Tensor<1, Int>) -> Rows {
        let scalars = |pool: &Tensor<1>| pool.clone().select(0, slots.clone());
        let tracks = self.tracks.iter();
        Rows {
            keys: self.keys.clone().select(0, slots.clone()),
            values: self.values.clone().select(0, slots.clone()),
            positions: self.positions.clone().select(0, slots.clone()),
            log_weights: self.log_weights.as_ref().map(scalars),
            tracks: tracks.map(|(name, track)| (name.clone(), scalars(&track.values))).collect(),
        }
    }

    /// Writes `rows` to `slots` in place: keys, values, positions, weights and tracks, cast to the
    /// cache's dtypes. Negative slots are skipped.
    pub(crate) fn write_slots(&mut self, slots: &Tensor<1, Int>, mut rows: Rows) -> Result<()> {
        let dtype = self.options.dtype;
        let (count, device) = (slots.dims()[0], self.options.device.clone());
        let fill = |value: f32| Tensor::full([count], value, (&device, DType::F32));
        scatter_rows(&mut self.keys, slots.clone(), rows.keys.cast(dtype))?;
        scatter_rows(&mut self.values, slots.clone(), rows.values.cast(dtype))?;
        scatter_ints(&mut self.positions, slots.clone(), rows.positions.cast(DType::I32))?;
        if let Some(pool) = &mut self.log_weights {
            scatter_scalars(pool, slots.clone(), rows.log_weights.unwrap_or_else(|| fill(0.0)))?;
        }
        for (name, track) in &mut self.tracks {
            let values = rows.tracks.remove(name).unwrap_or_else(|| fill(track.initial));
            scatter_scalars(&mut track.values, slots.clone(), values)?;
        }
        Ok(())
    }

    /// Copies the slots `rows` of another cache into `slots`. Tracks that it lacks are reset.
    pub(super) fn copy_from(
        &mut self,
        other: &Self,
        rows: &Tensor<1, Int>,
        slots: &Tensor<1, Int>,
    ) -> Result<()> {
        let source = SlotSource {
            keys: &other.keys,
            values: &other.values,
            positions: &other.positions,
            log_weights: other.log_weights.as_ref(),
        };
        let (pool, _) = self.pool();
        copy_slots(source, rows.clone(), pool, slots.clone())?;
        for (name, track) in &mut self.tracks {
            match other.tracks.get(name) {
                Some(other) => {
                    let values = other.values.clone().select(0, rows.clone());
                    scatter_scalars(&mut track.values, slots.clone(), values)?;
                }
                None => track.reset(slots)?,
            }
        }
        Ok(())
    }

    /// The tensors that kernels write in place.
    pub(super) fn pool(&mut self) -> (SlotPool<'_>, &mut SlotRanges) {
        let (pool, _, ranges) = self.pool_and_tracks();
        (pool, ranges)
    }

    /// The tensors that kernels write in place, and the tracks.
    pub(super) fn pool_and_tracks(
        &mut self,
    ) -> (SlotPool<'_>, &mut BTreeMap<String, Track>, &mut SlotRanges) {
        let pool = SlotPool {
            keys: &mut self.keys,
            values: &mut self.values,
            positions: &mut self.positions,
            log_weights: self.log_weights.as_mut(),
        };
        (pool, &mut self.tracks, &mut self.ranges)
    }

    /// All live slots, head after head.
    pub(crate) fn live_slots(&self) -> Tensor<1, Int> {
        self.upload(self.layout.live_slots())
    }

    /// The first `lengths` slots of every head, up to its capacity, `[B * Hkv, most]`, and −1
    /// behind them.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of heads, [`Error::IndexOutOfRange`] for more slots than
    /// a head has.
    pub fn first_slots(&self, lengths: &[usize]) -> Result<Tensor<2, Int>> {
        expect_shape("lengths", &[lengths.len()], &[self.layout.head_ranges()])?;
        let mut heads = lengths.iter().zip(self.layout.capacities());
        if let Some((&length, &capacity)) = heads.find(|(length, capacity)| length > capacity) {
            return Err(Error::IndexOutOfRange {
                what: "first slots",
                index: length - 1,
                limit: capacity,
            });
        }
        let (total_kv_heads, device) = (self.layout.head_ranges(), &self.options.device);
        let most = lengths.iter().copied().max().unwrap_or_default().max(1);
        let offsets = self.ranges.offsets.clone().reshape([total_kv_heads]);
        Ok(listed(
            columns(total_kv_heads, most, device),
            offsets,
            self.upload(lengths.iter().copied()),
        ))
    }

    /// Each head's first free slot, `[B * Hkv]`.
    pub(super) fn free_slots(&self) -> Tensor<1, Int> {
        (self.ranges.offsets.clone() + self.ranges.lengths.clone())
            .reshape([self.layout.head_ranges()])
    }

    /// Slots as a device tensor.
    pub(super) fn upload(&self, slots: impl Iterator<Item = usize>) -> Tensor<1, Int> {
        let slots: Vec<i32> = slots.map(|slot| slot as i32).collect();
        let count = slots.len();
        ints(slots, [count], &self.options.device)
    }
}
