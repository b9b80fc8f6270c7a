//! Writing tokens into slots: a prompt's tokens, and appended ones.
//!
//! A token that overwrites a slot is not written here. `WriteSlots` of `kv-policies`
//! (`policy/write_slots.rs`) chooses that slot a step before, and writes the token.

use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{HeadLayout, Placement, SlotSource, copy_slots, reset_last, write_heads};

use super::expect_shape;
use super::slots::Rows;
use crate::tensors::ints;
use crate::{CacheOptions, Error, LayerCache, Result, Room, Selection, SlotLayout, counted};

impl LayerCache {
    /// A cache of the tokens that `selection` keeps of a prefilled prompt, with `room` for more.
    ///
    /// # Shapes
    /// `keys`, `values` `[B, Hkv, T, D]`; `positions` `[B, T]`, the tokens' logical positions.
    ///
    /// # Errors
    /// [`crate::Error`] where shapes or the selection do not fit.
    pub fn from_prefill(
        keys: &Tensor<4>,
        values: &Tensor<4>,
        positions: &Tensor<2, Int>,
        selection: &Selection,
        room: Room,
        options: CacheOptions,
    ) -> Result<Self> {
        let lengths = selection.lengths().iter();
        let capacities = lengths.map(|&length| room.capacity(length)).collect();
        Self::from_prefill_within(keys, values, positions, selection, capacities, options)
    }

    /// [`Self::from_prefill`] in heads of these capacities, `[B * Hkv]`.
    ///
    /// # Errors
    /// The errors of [`Self::from_prefill`]; [`Error::InvalidPlan`] where a head keeps more than it
    /// has room for.
    pub fn from_prefill_within(
        keys: &Tensor<4>,
        values: &Tensor<4>,
        positions: &Tensor<2, Int>,
        selection: &Selection,
        capacities: Vec<usize>,
        options: CacheOptions,
    ) -> Result<Self> {
        let [batch, kv_heads, tokens, head_dim] = keys.dims();
        expect_shape("values", &values.dims(), &[batch, kv_heads, tokens, head_dim])?;
        expect_shape("positions", &positions.dims(), &[batch, tokens])?;
        selection.check(&vec![tokens; batch * kv_heads])?;
        if !matches!(options.dtype, DType::F32 | DType::F16 | DType::BF16) {
            let (expected, actual) = (keys.dtype(), options.dtype);
            return Err(Error::Dtype { what: "the cache's options", expected, actual });
        }

        let lengths = selection.lengths().to_vec();
        expect_shape("capacities", &[capacities.len()], &[lengths.len()])?;
        let mut heads = lengths.iter().zip(&capacities).enumerate();
        if let Some((head, (length, capacity))) = heads.find(|(_, (l, c))| l > c) {
            let length = counted(*length, "slot");
            let reason = format!("head {head} keeps {length}, room is for {capacity}");
            return Err(Error::InvalidPlan { what: "capacities", reason });
        }
        let layout = SlotLayout::new(kv_heads, capacities);
        let mut cache = Self::new(layout, head_dim, options);
        if selection.total() > 0 {
            let firsts: Vec<usize> = (0..lengths.len()).map(|range| range * tokens).collect();
            let from = selection.lists(&firsts, &cache.options.device)?.slots;
            let flat =
                |tensor: &Tensor<4>| tensor.clone().reshape([batch * kv_heads * tokens, head_dim]);
            let positions = positions.clone().cast(DType::I32).unsqueeze_dim::<3>(1);
            let positions = positions.expand([batch, kv_heads, tokens]);
            let source = SlotSource {
                keys: &flat(keys),
                values: &flat(values),
                positions: &positions.reshape([batch * kv_heads * tokens]),
                log_weights: None,
            };
            let to = cache.first_slots(&lengths)?;
            let (pool, _) = cache.pool();
            copy_slots(source, from.flatten(0, 1), pool, to.flatten(0, 1))?;
        }
        cache.set_lengths(lengths);
        Ok(cache)
    }

    /// Appends one token to every head of every sequence, without waiting for the device.
    ///
    /// # Shapes
    /// `keys`, `values` `[B, Hkv, D]`; `positions` `[B]`.
    ///
    /// # Errors
    /// [`crate::Error::CapacityExhausted`] where a head is full (unless growable),
    /// [`crate::Error::Shape`].
    pub fn append(
        &mut self,
        keys: Tensor<3>,
        values: Tensor<3>,
        positions: Tensor<1, Int>,
    ) -> Result<()> {
        let [batch, kv_heads, head_dim] = keys.dims();
        self.extend(
            keys.reshape([batch, kv_heads, 1, head_dim]),
            values.unsqueeze_dim(2),
            positions.unsqueeze_dim(1),
        )
    }

    /// Appends one token to every head of every sequence as a layer projects it, in one launch, and
    /// returns its queries, `[B, Hq, D]`.
    ///
    /// # Shapes
    /// `projected` `[B, (Hq + 2 Hkv) D]`; `positions` `[B]`.
    ///
    /// # Errors
    /// The errors of [`Self::append`], and the errors of [`write_heads`].
    pub fn append_projected(
        &mut self,
        projected: Tensor<2>,
        positions: Tensor<1, Int>,
        heads: &HeadLayout,
    ) -> Result<Tensor<3>> {
        expect_shape("kv heads", &[heads.kv_heads], &[self.layout.kv_heads()])?;
        expect_shape("positions", &positions.dims(), &[self.layout.batch()])?;
        self.reserve(1)?;
        self.states.drop_void();
        let (pool, ranges) = self.pool();
        let query = write_heads(projected, positions, heads, pool, Placement::Append(ranges))?;
        self.layout.lengths_mut().iter_mut().for_each(|length| *length += 1);
        self.note_tokens(1);
        let states = &self.states;
        let tracks = self.tracks.iter_mut().filter(|(name, _)| !states.set_track(name));
        let mut tracks: Vec<_> =
            tracks.map(|(_, track)| (&mut track.values, track.initial)).collect();
        if !tracks.is_empty() {
            reset_last(&mut tracks, &self.ranges)?;
        }
        Ok(query)
    }

    /// Appends `N` tokens to every head of every sequence.
    ///
    /// # Shapes
    /// `keys`, `values` `[B, Hkv, N, D]`; `positions` `[B, N]`.
    ///
    /// # Errors
    /// The errors of [`Self::append`].
    pub fn extend(
        &mut self,
        keys: Tensor<4>,
        values: Tensor<4>,
        positions: Tensor<2, Int>,
    ) -> Result<()> {
        let tokens = keys.dims()[2];
        self.check_tokens(&keys, &values, &positions)?;
        if tokens == 0 {
            return Ok(());
        }
        self.reserve(tokens)?;
        self.states.drop_void();
        let total_kv_heads = self.layout.head_ranges();
        let mut slots = self.free_slots().reshape([total_kv_heads, 1]);
        if tokens > 1 {
            let steps = ints((0..tokens as i32).collect(), [1, tokens], &self.options.device);
            slots = slots.expand([total_kv_heads, tokens]) + steps.expand([total_kv_heads, tokens]);
        }
        let rows = Self::token_rows(keys, values, positions);
        self.write_slots(&slots.reshape([total_kv_heads * tokens]), rows)?;
        self.ranges.lengths = self.ranges.lengths.clone().add_scalar(tokens as i32);
        self.layout.lengths_mut().iter_mut().for_each(|length| *length += tokens);
        self.note_tokens(tokens);
        Ok(())
    }

    /// Overwrites one slot of every head range by a new token. `slots` `[B * Hkv]`, 32-bit, are
    /// slots of the pool, on the device and not checked. The token's weight is 1, and its tracks
    /// have their initial values. Lengths stay: [`Self::change_slots`] changes them.
    ///
    /// # Shapes
    /// The shapes of [`Self::append`].
    ///
    /// # Errors
    /// [`crate::Error::Shape`].
    pub fn write_tokens(
        &mut self,
        slots: &Tensor<1, Int>,
        keys: Tensor<3>,
        values: Tensor<3>,
        positions: Tensor<1, Int>,
    ) -> Result<()> {
        let (keys, values) = (keys.unsqueeze_dim(2), values.unsqueeze_dim(2));
        let positions = positions.unsqueeze_dim(1);
        self.check_tokens(&keys, &values, &positions)?;
        self.write_slots(slots, Self::token_rows(keys, values, positions))
    }

    /// Checks the shapes of `N` tokens of every head.
    pub(super) fn check_tokens(
        &self,
        keys: &Tensor<4>,
        values: &Tensor<4>,
        positions: &Tensor<2, Int>,
    ) -> Result<()> {
        let (batch, tokens) = (self.layout.batch(), keys.dims()[2]);
        let shape = [batch, self.layout.kv_heads(), tokens, self.head_dim()];
        expect_shape("keys", &keys.dims(), &shape)?;
        expect_shape("values", &values.dims(), &shape)?;
        expect_shape("positions", &positions.dims(), &[batch, tokens])
    }

    /// `N` tokens of every head as rows, head after head.
    pub(super) fn token_rows(
        keys: Tensor<4>,
        values: Tensor<4>,
        positions: Tensor<2, Int>,
    ) -> Rows {
        let [batch, kv_heads, tokens, head_dim] = keys.dims();
        let count = batch * kv_heads * tokens;
        let positions = positions.unsqueeze_dim::<3>(1).expand([batch, kv_heads, tokens]);
        Rows::new(
            keys.reshape([count, head_dim]),
            values.reshape([count, head_dim]),
            positions.reshape([count]),
        )
    }
}
