use std::collections::BTreeMap;
use std::sync::OnceLock;

use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{
    AttentionOutput, DecodeAttentionOptions, SlotRanges, argmin_slots, decode_attention,
    scatter_ints, scatter_rows, scatter_scalars,
};

use crate::tensors::{floats, ints, read_f32, read_i32};
use crate::{Error, MemoryReport, Result, Selection, SlotLayout};

/// How a cache stores its slots.
#[derive(Debug, Clone)]
pub struct CacheOptions {
    /// Where.
    pub device: Device,
    /// Keys' and values' dtype: f32, f16 or bf16.
    pub dtype: DType,
    /// Whether slots carry weights; without, all weights are 1 and cost nothing.
    pub weighted: bool,
    /// Whether a full head makes the pool grow instead of failing. Growing allocates a new pool.
    pub growable: bool,
}

impl CacheOptions {
    /// Unweighted slots of a fixed capacity.
    pub fn new(device: &Device, dtype: DType) -> Self {
        Self { device: device.clone(), dtype, weighted: false, growable: false }
    }
}

/// Free slots to reserve beyond what is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// This many in every head.
    Extra(usize),
    /// Up to this many slots in every head, kept ones included (never less than what is kept).
    Total(usize),
}

/// One layer's slots, for every (sequence, key-value head) of a batch.
///
/// Policies keep numbers of their own beside the slots: *tracks* (one f32 a slot, such as
/// accumulated attention) follow every append, move, selection and merge; *state* tensors belong to
/// the layer as a whole. Both are saved with the cache.
///
/// The cache owns its tensors and writes into them in place; none is handed out but by reference.
/// `Clone` copies deeply.
#[derive(Debug)]
pub struct LayerCache {
    pub(crate) layout: SlotLayout,
    pub(crate) ranges: SlotRanges,
    pub(crate) keys: Tensor<2>,
    pub(crate) values: Tensor<2>,
    pub(crate) positions: Tensor<1, Int>,
    pub(crate) log_weights: Option<Tensor<1>>,
    pub(crate) tracks: BTreeMap<String, Track>,
    pub(crate) state: BTreeMap<String, Tensor<3>>,
    /// Slots that a policy lets each head hold after a decode step, `[B * Hkv]`.
    pub(crate) limits: Option<Vec<usize>>,
    /// The (sequence, head) of every slot, `[S]`, made when first asked for.
    pub(crate) slot_pairs: OnceLock<Tensor<1, Int>>,
    pub(crate) options: CacheOptions,
}

/// One policy number a slot.
#[derive(Debug)]
pub(crate) struct Track {
    /// What a newly appended slot starts with.
    pub(crate) initial: f32,
    /// `[S]`
    pub(crate) values: Tensor<1>,
}

impl LayerCache {
    /// An empty cache of `head_dim`-wide slots.
    pub fn new(layout: SlotLayout, head_dim: usize, options: CacheOptions) -> Self {
        let (device, dtype) = (options.device.clone(), options.dtype);
        // Empty pools still hold one slot, so that kernels always have a buffer.
        let slots = layout.total().max(1);
        let mut layout = layout;
        layout.lengths_mut().fill(0);
        Self {
            ranges: layout.to_device(&device),
            keys: Tensor::zeros([slots, head_dim], (&device, dtype)),
            values: Tensor::zeros([slots, head_dim], (&device, dtype)),
            positions: Tensor::zeros([slots], (&device, DType::I32)),
            log_weights: options
                .weighted
                .then(|| Tensor::zeros([slots], (&device, DType::F32))),
            tracks: BTreeMap::new(),
            state: BTreeMap::new(),
            limits: None,
            slot_pairs: OnceLock::new(),
            layout,
            options,
        }
    }

    /// A cache of what `selection` keeps of a prefilled prompt, allocated to that plus `room`.
    ///
    /// # Shapes
    /// `keys`, `values` `[B, Hkv, T, D]`; `positions` `[B, T]`, the tokens' logical positions.
    ///
    /// # Errors
    /// [`Error`] where shapes or the selection do not fit.
    pub fn from_prefill(
        keys: &Tensor<4>,
        values: &Tensor<4>,
        positions: &Tensor<2, Int>,
        selection: &Selection,
        room: Room,
        options: CacheOptions,
    ) -> Result<Self> {
        let [batch, kv_heads, tokens, head_dim] = keys.dims();
        expect_shape("values", &values.dims(), &[batch, kv_heads, tokens, head_dim])?;
        expect_shape("positions", &positions.dims(), &[batch, tokens])?;
        selection.check(&vec![tokens; batch * kv_heads])?;

        let capacities = selection
            .kept()
            .iter()
            .map(|kept| match room {
                Room::Extra(extra) => kept.len() + extra,
                Room::Total(total) => total.max(kept.len()),
            })
            .collect();
        let mut cache = Self::new(SlotLayout::new(kv_heads, capacities), head_dim, options);

        let rows = |source: &dyn Fn(usize, u32) -> usize| -> Vec<i32> {
            let kept = selection.kept().iter().enumerate();
            kept.flat_map(|(pair, kept)| kept.iter().map(move |&token| (pair, token)))
                .map(|(pair, token)| source(pair, token) as i32)
                .collect()
        };
        let total = selection.total();
        if total > 0 {
            let device = cache.options.device.clone();
            let from = ints(rows(&|pair, token| pair * tokens + token as usize), [total], &device);
            let from_positions = rows(&|pair, token| pair / kv_heads * tokens + token as usize);
            let from_positions = ints(from_positions, [total], &device);
            let dtype = cache.options.dtype;
            let flat = |tensor: &Tensor<4>| {
                let rows = tensor.clone().reshape([batch * kv_heads * tokens, head_dim]);
                rows.select(0, from.clone()).cast(dtype)
            };
            let positions = positions.clone().reshape([batch * tokens]).cast(DType::I32);
            let to = cache.compacted_slots(selection.kept().iter().map(Vec::len));
            scatter_rows(&mut cache.keys, to.clone(), flat(keys))?;
            scatter_rows(&mut cache.values, to.clone(), flat(values))?;
            scatter_ints(&mut cache.positions, to, positions.select(0, from_positions))?;
        }
        let lengths = selection.kept().iter().map(Vec::len).collect();
        cache.set_lengths(lengths);
        Ok(cache)
    }

    /// `Hkv`, batch, ranges.
    pub fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    /// Offsets and lengths on the device.
    pub fn ranges(&self) -> &SlotRanges {
        &self.ranges
    }

    /// Options that the cache was built with.
    pub fn options(&self) -> &CacheOptions {
        &self.options
    }

    /// `D`.
    pub fn head_dim(&self) -> usize {
        self.keys.dims()[1]
    }

    /// All slots' keys, `[S, D]`; only live slots hold meaningful rows.
    pub fn keys(&self) -> &Tensor<2> {
        &self.keys
    }

    /// All slots' values, `[S, D]`.
    pub fn values(&self) -> &Tensor<2> {
        &self.values
    }

    /// All slots' logical positions, `[S]`.
    pub fn positions(&self) -> &Tensor<1, Int> {
        &self.positions
    }

    /// All slots' log-weights `ln w`, `[S]`; `None` where every weight is 1.
    pub fn log_weights(&self) -> Option<&Tensor<1>> {
        self.log_weights.as_ref()
    }

    /// Replaces the weights. `log_weights` is `[S]`, f32.
    ///
    /// # Errors
    /// [`Error::Shape`] for another length.
    pub fn set_log_weights(&mut self, log_weights: Tensor<1>) -> Result<()> {
        expect_shape("log_weights", &log_weights.dims(), &[self.keys.dims()[0]])?;
        self.options.weighted = true;
        self.log_weights = Some(log_weights);
        Ok(())
    }

    /// A policy's per-slot numbers, `[S]`, f32.
    pub fn track(&self, name: &str) -> Option<&Tensor<1>> {
        self.tracks.get(name).map(|track| &track.values)
    }

    /// Sets a policy's per-slot numbers, creating the track if need be. `initial` is what a newly
    /// appended slot starts with.
    ///
    /// # Errors
    /// [`Error::Shape`] where `values` is not `[S]`.
    pub fn set_track(&mut self, name: &str, values: Tensor<1>, initial: f32) -> Result<()> {
        expect_shape("track", &values.dims(), &[self.keys.dims()[0]])?;
        self.tracks.insert(name.to_string(), Track { initial, values });
        Ok(())
    }

    /// Sets a track from one value a live slot, in the order of [`SlotLayout::live`] over all pairs.
    ///
    /// # Errors
    /// [`Error::Shape`] where the number of values differs from the live slots.
    pub fn set_live_track(&mut self, name: &str, live: &[f32], initial: f32) -> Result<()> {
        let values = self.spread_live(live, initial)?;
        self.set_track(name, values, initial)
    }

    /// Sets the log-weights from one value a live slot.
    ///
    /// # Errors
    /// As [`Self::set_live_track`].
    pub fn set_live_log_weights(&mut self, live: &[f32]) -> Result<()> {
        let values = self.spread_live(live, 0.0)?;
        self.set_log_weights(values)
    }

    /// A tensor that belongs to the policy's state of this layer.
    pub fn state(&self, name: &str) -> Option<&Tensor<3>> {
        self.state.get(name)
    }

    /// Stores a state tensor.
    pub fn set_state(&mut self, name: &str, tensor: Tensor<3>) {
        self.state.insert(name.to_string(), tensor);
    }

    /// Slots that the policy lets each head hold after a decode step, `[B * Hkv]`.
    pub fn limits(&self) -> Option<&[usize]> {
        self.limits.as_deref()
    }

    /// Sets the limits.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of heads.
    pub fn set_limits(&mut self, limits: Vec<usize>) -> Result<()> {
        expect_shape("limits", &[limits.len()], &[self.layout.pairs()])?;
        self.limits = Some(limits);
        Ok(())
    }

    /// The (sequence, key-value head) pair that each slot of the pool is reserved for, `[S]`.
    pub fn slot_pairs(&self) -> &Tensor<1, Int> {
        self.slot_pairs.get_or_init(|| {
            let slots = self.keys.dims()[0];
            let capacities = self.layout.capacities().iter().enumerate();
            let mut pairs: Vec<i32> = capacities
                .flat_map(|(pair, &capacity)| std::iter::repeat_n(pair as i32, capacity))
                .collect();
            pairs.resize(slots, 0);
            ints(pairs, [slots], &self.options.device)
        })
    }

    /// Bytes allocated, in use, for metadata and for policies.
    pub fn memory(&self) -> MemoryReport {
        MemoryReport::of_layer(self)
    }

    /// Appends one token to every head of every sequence, without waiting for the device.
    ///
    /// # Shapes
    /// `keys`, `values` `[B, Hkv, D]`; `positions` `[B]`.
    ///
    /// # Errors
    /// [`Error::CapacityExhausted`] where a head is full (unless growable), [`Error::Shape`].
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

    /// Appends `N` tokens to every head of every sequence.
    ///
    /// # Shapes
    /// `keys`, `values` `[B, Hkv, N, D]`; `positions` `[B, N]`.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub fn extend(
        &mut self,
        keys: Tensor<4>,
        values: Tensor<4>,
        positions: Tensor<2, Int>,
    ) -> Result<()> {
        let (batch, kv_heads, head_dim) =
            (self.layout.batch(), self.layout.kv_heads(), self.head_dim());
        let tokens = keys.dims()[2];
        expect_shape("keys", &keys.dims(), &[batch, kv_heads, tokens, head_dim])?;
        expect_shape("values", &values.dims(), &[batch, kv_heads, tokens, head_dim])?;
        expect_shape("positions", &positions.dims(), &[batch, tokens])?;
        if tokens == 0 {
            return Ok(());
        }
        self.reserve(tokens)?;

        let pairs = batch * kv_heads;
        let rows = pairs * tokens;
        let mut slots = self.free_slots().reshape([pairs, 1]);
        let mut positions = positions.cast(DType::I32).unsqueeze_dim::<3>(1);
        if tokens > 1 {
            let steps = Tensor::arange(0..tokens as i64, (&self.options.device, DType::I32));
            slots = slots.expand([pairs, tokens]) + steps.unsqueeze::<2>().expand([pairs, tokens]);
        }
        positions = positions.expand([batch, kv_heads, tokens]);
        let slots = slots.reshape([rows]);
        let dtype = self.options.dtype;
        scatter_rows(&mut self.keys, slots.clone(), keys.cast(dtype).reshape([rows, head_dim]))?;
        let values = values.cast(dtype).reshape([rows, head_dim]);
        scatter_rows(&mut self.values, slots.clone(), values)?;
        scatter_ints(&mut self.positions, slots.clone(), positions.reshape([rows]))?;
        let fill = |value: f32| Tensor::full([rows], value, (&self.options.device, DType::F32));
        if let Some(weights) = &mut self.log_weights {
            scatter_scalars(weights, slots.clone(), fill(0.0))?;
        }
        for track in self.tracks.values_mut() {
            scatter_scalars(&mut track.values, slots.clone(), fill(track.initial))?;
        }
        self.ranges.lengths = self.ranges.lengths.clone().add_scalar(tokens as i32);
        self.layout.lengths_mut().iter_mut().for_each(|length| *length += tokens);
        Ok(())
    }

    /// Attention of one query per sequence over its live slots.
    ///
    /// # Shapes
    /// `query` `[B, Hq, D]`.
    ///
    /// # Errors
    /// See [`decode_attention`].
    pub fn attend(
        &self,
        query: Tensor<3>,
        options: DecodeAttentionOptions,
    ) -> Result<AttentionOutput> {
        self.attend_weighted(query, self.log_weights.clone(), options)
    }

    /// The same with other log-weights `[S]` than the cache's own, such as −∞ for slots that a
    /// policy does not read.
    ///
    /// # Errors
    /// See [`decode_attention`].
    pub fn attend_weighted(
        &self,
        query: Tensor<3>,
        log_weights: Option<Tensor<1>>,
        options: DecodeAttentionOptions,
    ) -> Result<AttentionOutput> {
        let (keys, values) = (self.keys.clone(), self.values.clone());
        Ok(decode_attention(query, keys, values, log_weights, &self.ranges, options)?)
    }

    /// Causal attention of the last `N` appended tokens: query `n` sees all slots but those of the
    /// tokens behind it. Valid as long as those slots are the last ones, that is straight after
    /// [`Self::extend`].
    ///
    /// # Shapes
    /// `query` `[B, Hq, N, D]`; returns the same.
    ///
    /// # Errors
    /// See [`decode_attention`].
    pub fn attend_extended(&self, query: Tensor<4>) -> Result<Tensor<4>> {
        let [batch, heads, tokens, head_dim] = query.dims();
        let kv_heads = self.layout.kv_heads();
        // Each query is a sequence of its own that sees a prefix of the same slots.
        let rows = batch * tokens;
        let spread = |ranges: &Tensor<2, Int>| {
            ranges.clone().unsqueeze_dim::<3>(1).expand([batch, tokens, kv_heads])
        };
        let hidden: Vec<i32> = (0..tokens).rev().map(|behind| behind as i32).collect();
        let hidden = ints(hidden, [1, tokens, 1], &self.options.device)
            .expand([batch, tokens, kv_heads]);
        let ranges = SlotRanges {
            offsets: spread(&self.ranges.offsets).reshape([rows, kv_heads]),
            lengths: (spread(&self.ranges.lengths) - hidden).reshape([rows, kv_heads]),
        };
        let output = decode_attention(
            query.swap_dims(1, 2).reshape([rows, heads, head_dim]),
            self.keys.clone(),
            self.values.clone(),
            self.log_weights.clone(),
            &ranges,
            DecodeAttentionOptions::default(),
        )?;
        Ok(output.output.reshape([batch, tokens, heads, head_dim]).swap_dims(1, 2))
    }

    /// Overwrites one slot per (sequence, head) in place: weight 1, tracks at their initial value.
    ///
    /// # Shapes
    /// `slots` `[B, Hkv]` (pool indices, 32-bit; negative ones are skipped), `keys`, `values`
    /// `[B, Hkv, D]`, `positions` `[B]`.
    ///
    /// # Errors
    /// [`Error::Shape`]. The slots are on the device and must be live ones.
    pub fn overwrite(
        &mut self,
        slots: Tensor<2, Int>,
        keys: Tensor<3>,
        values: Tensor<3>,
        positions: Tensor<1, Int>,
    ) -> Result<()> {
        let (batch, kv_heads, head_dim) =
            (self.layout.batch(), self.layout.kv_heads(), self.head_dim());
        let pairs = batch * kv_heads;
        expect_shape("slots", &slots.dims(), &[batch, kv_heads])?;
        expect_shape("keys", &keys.dims(), &[batch, kv_heads, head_dim])?;
        expect_shape("values", &values.dims(), &[batch, kv_heads, head_dim])?;
        expect_shape("positions", &positions.dims(), &[batch])?;
        let slots = slots.cast(DType::I32).reshape([pairs]);
        let dtype = self.options.dtype;
        let positions = positions.cast(DType::I32).unsqueeze_dim::<2>(1).expand([batch, kv_heads]);
        scatter_rows(&mut self.keys, slots.clone(), keys.cast(dtype).reshape([pairs, head_dim]))?;
        let values = values.cast(dtype).reshape([pairs, head_dim]);
        scatter_rows(&mut self.values, slots.clone(), values)?;
        scatter_ints(&mut self.positions, slots.clone(), positions.reshape([pairs]))?;
        let fill = |value: f32| Tensor::full([pairs], value, (&self.options.device, DType::F32));
        if let Some(weights) = &mut self.log_weights {
            scatter_scalars(weights, slots.clone(), fill(0.0))?;
        }
        for track in self.tracks.values_mut() {
            scatter_scalars(&mut track.values, slots.clone(), fill(track.initial))?;
        }
        Ok(())
    }

    /// Drops the slot of lowest score from every head that holds more than its limit, in place and
    /// without waiting for the device: the head's last slot moves into the gap. Ties go to the
    /// lower slot.
    ///
    /// # Shapes
    /// `scores` `[S]`, f32; `limits` `[B * Hkv]`.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for a limit of 0, [`Error::Shape`].
    pub fn evict_lowest(&mut self, scores: Tensor<1>, limits: &[usize]) -> Result<()> {
        let pairs = self.layout.pairs();
        expect_shape("limits", &[limits.len()], &[pairs])?;
        expect_shape("scores", &scores.dims(), &[self.keys.dims()[0]])?;
        if let Some(pair) = limits.iter().position(|&limit| limit == 0) {
            return Err(Error::InvalidPlan {
                what: "eviction",
                reason: format!("the limit of head {pair} is 0 slots"),
            });
        }
        let over: Vec<bool> = self
            .layout
            .lengths()
            .iter()
            .zip(limits)
            .map(|(&length, &limit)| length > limit)
            .collect();
        if !over.contains(&true) {
            return Ok(());
        }
        let victims = argmin_slots(scores, &self.ranges)?.reshape([pairs]);
        let shape = [self.layout.batch(), self.layout.kv_heads()];
        let dropped = if over.contains(&false) {
            let dropped: Vec<i32> = over.iter().map(|&over| i32::from(over)).collect();
            ints(dropped, shape, &self.options.device)
        } else {
            Tensor::ones(shape, (&self.options.device, DType::I32))
        };
        let last = self.free_slots().sub_scalar(1);
        // Heads within their limit skip the write.
        let keep = dropped.clone().reshape([pairs]).equal_scalar(0);
        let victims = victims.mask_fill(keep, -1);
        self.move_slots(last, victims)?;
        self.ranges.lengths = self.ranges.lengths.clone() - dropped;
        for (length, over) in self.layout.lengths_mut().iter_mut().zip(over) {
            *length -= usize::from(over);
        }
        Ok(())
    }

    /// Keeps the selected live slots of every head (indices count from the head's first slot) and
    /// compacts them in order, within the same pool. [`Self::resize`] gives memory back.
    ///
    /// # Errors
    /// [`Error`] where the selection does not fit.
    pub fn retain(&mut self, selection: &Selection) -> Result<()> {
        selection.check(self.layout.lengths())?;
        let lengths: Vec<usize> = selection.kept().iter().map(Vec::len).collect();
        if selection.total() > 0 {
            let to = self.compacted_slots(lengths.iter().copied());
            let from = self.selected_slots(selection);
            self.move_slots(from, to)?;
        }
        self.set_lengths(lengths);
        Ok(())
    }

    /// Moves the live slots into a new pool of other capacities (the old one is freed).
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] where a head's capacity is below its length.
    pub fn resize(&mut self, capacities: Vec<usize>) -> Result<()> {
        expect_shape("capacities", &[capacities.len()], &[self.layout.pairs()])?;
        let small = capacities.iter().zip(self.layout.lengths()).position(|(c, l)| c < l);
        if let Some(pair) = small {
            return Err(Error::InvalidPlan {
                what: "resize",
                reason: format!(
                    "head {pair} holds {} slots, a capacity of {} was asked for",
                    self.layout.lengths()[pair],
                    capacities[pair]
                ),
            });
        }
        let lengths = self.layout.lengths().to_vec();
        let layout = SlotLayout::new(self.layout.kv_heads(), capacities);
        let mut resized = Self::new(layout, self.head_dim(), self.options.clone());
        for (name, track) in &self.tracks {
            let fresh = Tensor::full_like(&resized.positions.clone().float(), track.initial)
                .cast(DType::F32);
            resized.set_track(name, fresh, track.initial)?;
        }
        if self.layout.used() > 0 {
            let everything = Selection::new(
                lengths.iter().map(|&length| (0..length as u32).collect()).collect(),
            )?;
            let from = self.selected_slots(&everything);
            let to = resized.compacted_slots(lengths.iter().copied());
            resized.copy_slots(self, from, to)?;
        }
        resized.set_lengths(lengths);
        resized.state = std::mem::take(&mut self.state);
        resized.limits = self.limits.take();
        *self = resized;
        Ok(())
    }

    /// Frees all capacity beyond the live slots and `room`.
    ///
    /// # Errors
    /// As [`Self::resize`].
    pub fn shrink(&mut self, room: usize) -> Result<()> {
        self.resize(self.layout.lengths().iter().map(|length| length + room).collect())
    }

    /// The live slots of one pair, read to the host: for policies that decide there.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn read_positions(&self) -> Result<Vec<i32>> {
        read_i32("positions", self.positions.clone())
    }

    /// All slots' weights `w`, read to the host.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn read_weights(&self) -> Result<Vec<f32>> {
        match &self.log_weights {
            Some(weights) => read_f32("log_weights", weights.clone().exp()),
            None => Ok(vec![1.0; self.keys.dims()[0]]),
        }
    }

    /// Batches the sequences of several caches of one layer into one, with room to decode. Tracks
    /// and weights that only some have get their neutral value in the others; state tensors are
    /// joined along their first dimension, the batch, and must be there in all or none.
    ///
    /// # Errors
    /// [`Error`] where head counts, head dims or state do not fit.
    pub fn concat(parts: Vec<Self>) -> Result<Self> {
        let Some(first) = parts.first() else {
            return Err(Error::InvalidPlan { what: "concat", reason: "no caches".into() });
        };
        if parts.len() == 1 {
            let mut parts = parts;
            return parts.pop().ok_or(Error::InvalidPlan { what: "concat", reason: String::new() });
        }
        let (kv_heads, head_dim) = (first.layout.kv_heads(), first.head_dim());
        let mut options = first.options.clone();
        options.weighted = parts.iter().any(|part| part.log_weights.is_some());
        let capacities = parts.iter().flat_map(|part| part.layout.capacities().to_vec()).collect();
        let lengths: Vec<usize> =
            parts.iter().flat_map(|part| part.layout.lengths().to_vec()).collect();
        let mut joined = Self::new(SlotLayout::new(kv_heads, capacities), head_dim, options);
        let fresh = |initial: f32| {
            Tensor::full([joined.keys.dims()[0]], initial, (&joined.options.device, DType::F32))
        };
        let tracks: Vec<(String, Track)> = parts
            .iter()
            .flat_map(|part| &part.tracks)
            .map(|(name, track)| {
                let initial = track.initial;
                (name.clone(), Track { initial, values: fresh(initial) })
            })
            .collect();
        joined.tracks.extend(tracks);

        if parts.iter().any(|part| part.limits.is_some()) {
            let limits = parts.iter().flat_map(|part| match &part.limits {
                Some(limits) => limits.clone(),
                None => vec![usize::MAX; part.layout.pairs()],
            });
            joined.limits = Some(limits.collect());
        }
        let to = joined.compacted_targets(&lengths);
        let mut done = 0;
        let mut state: BTreeMap<String, Vec<Tensor<3>>> = BTreeMap::new();
        let count = parts.len();
        for part in parts {
            expect_shape("keys", &[part.layout.kv_heads(), part.head_dim()], &[kv_heads, head_dim])?;
            let used = part.layout.used();
            if used > 0 {
                let device = &joined.options.device;
                let to = ints(to[done..done + used].to_vec(), [used], device);
                let everything = part.layout.lengths().iter();
                let everything = everything.map(|&length| (0..length as u32).collect());
                let from = part.selected_slots(&Selection::new(everything.collect())?);
                joined.copy_slots(&part, from, to)?;
            }
            done += used;
            for (name, tensor) in part.state {
                state.entry(name).or_default().push(tensor);
            }
        }
        for (name, tensors) in state {
            if tensors.len() != count {
                return Err(Error::InvalidPlan {
                    what: "concat",
                    reason: format!("state `{name}` is in {} of {count} caches", tensors.len()),
                });
            }
            joined.state.insert(name, Tensor::cat(tensors, 0));
        }
        joined.set_lengths(lengths);
        Ok(joined)
    }

    /// Makes sure that every head can take `tokens` more.
    fn reserve(&mut self, tokens: usize) -> Result<()> {
        let full = (0..self.layout.pairs())
            .find(|&pair| self.layout.lengths()[pair] + tokens > self.layout.capacities()[pair]);
        let Some(pair) = full else { return Ok(()) };
        if !self.options.growable {
            return Err(Error::CapacityExhausted {
                sequence: pair / self.layout.kv_heads(),
                head: pair % self.layout.kv_heads(),
                capacity: self.layout.capacities()[pair],
                requested: self.layout.lengths()[pair] + tokens,
            });
        }
        let grown = self.layout.lengths().iter().zip(self.layout.capacities());
        self.resize(grown.map(|(length, capacity)| (length + tokens).max(2 * capacity)).collect())
    }

    /// Each head's first free slot, `[B * Hkv]`.
    fn free_slots(&self) -> Tensor<1, Int> {
        (self.ranges.offsets.clone() + self.ranges.lengths.clone()).reshape([self.layout.pairs()])
    }

    /// Slots of a selection's tokens, one behind the other.
    fn selected_slots(&self, selection: &Selection) -> Tensor<1, Int> {
        let slots: Vec<i32> = selection
            .kept()
            .iter()
            .zip(self.layout.offsets())
            .flat_map(|(kept, offset)| kept.iter().map(move |&slot| *offset as i32 + slot as i32))
            .collect();
        let total = slots.len();
        ints(slots, [total], &self.options.device)
    }

    /// The first `lengths` slots of every head, one behind the other.
    fn compacted_slots(&self, lengths: impl Iterator<Item = usize>) -> Tensor<1, Int> {
        let slots = self.compacted_targets(&lengths.collect::<Vec<_>>());
        let total = slots.len();
        ints(slots, [total], &self.options.device)
    }

    fn compacted_targets(&self, lengths: &[usize]) -> Vec<i32> {
        let ranges = self.layout.offsets().iter().zip(lengths);
        ranges.flat_map(|(&offset, &length)| offset as i32..(offset + length) as i32).collect()
    }

    /// Moves rows within the pool; all are read before any is written.
    fn move_slots(&mut self, from: Tensor<1, Int>, to: Tensor<1, Int>) -> Result<()> {
        let rows = self.keys.clone().select(0, from.clone());
        scatter_rows(&mut self.keys, to.clone(), rows)?;
        let rows = self.values.clone().select(0, from.clone());
        scatter_rows(&mut self.values, to.clone(), rows)?;
        let rows = self.positions.clone().select(0, from.clone());
        scatter_ints(&mut self.positions, to.clone(), rows)?;
        if let Some(weights) = &mut self.log_weights {
            let rows = weights.clone().select(0, from.clone());
            scatter_scalars(weights, to.clone(), rows)?;
        }
        for track in self.tracks.values_mut() {
            let rows = track.values.clone().select(0, from.clone());
            scatter_scalars(&mut track.values, to.clone(), rows)?;
        }
        Ok(())
    }

    /// Copies rows from another cache's pool.
    fn copy_slots(
        &mut self,
        source: &Self,
        from: Tensor<1, Int>,
        to: Tensor<1, Int>,
    ) -> Result<()> {
        let rows = source.keys.clone().select(0, from.clone());
        scatter_rows(&mut self.keys, to.clone(), rows)?;
        let rows = source.values.clone().select(0, from.clone());
        scatter_rows(&mut self.values, to.clone(), rows)?;
        let rows = source.positions.clone().select(0, from.clone());
        scatter_ints(&mut self.positions, to.clone(), rows)?;
        if let (Some(weights), Some(theirs)) = (&mut self.log_weights, &source.log_weights) {
            let rows = theirs.clone().select(0, from.clone());
            scatter_scalars(weights, to.clone(), rows)?;
        }
        for (name, track) in &mut self.tracks {
            if let Some(theirs) = source.tracks.get(name) {
                let rows = theirs.values.clone().select(0, from.clone());
                scatter_scalars(&mut track.values, to.clone(), rows)?;
            }
        }
        Ok(())
    }

    fn spread_live(&self, live: &[f32], elsewhere: f32) -> Result<Tensor<1>> {
        expect_shape("live values", &[live.len()], &[self.layout.used()])?;
        let slots = self.keys.dims()[0];
        let mut values = vec![elsewhere; slots];
        let mut live = live.iter();
        for pair in 0..self.layout.pairs() {
            for slot in self.layout.live(pair) {
                values[slot] = live.next().copied().unwrap_or(elsewhere);
            }
        }
        Ok(floats(values, [slots], &self.options.device))
    }

    pub(crate) fn set_lengths(&mut self, lengths: Vec<usize>) {
        self.layout.lengths_mut().copy_from_slice(&lengths);
        self.ranges = self.layout.to_device(&self.options.device);
    }
}

impl Clone for LayerCache {
    /// Copies every tensor: a kernel that wrote through a shared one would write into both.
    fn clone(&self) -> Self {
        let copy = |tensor: &Tensor<1>| tensor.clone().mul_scalar(1.0);
        let ints = |tensor: &Tensor<2, Int>| tensor.clone().add_scalar(0);
        Self {
            layout: self.layout.clone(),
            ranges: SlotRanges {
                offsets: ints(&self.ranges.offsets),
                lengths: ints(&self.ranges.lengths),
            },
            keys: self.keys.clone().mul_scalar(1.0),
            values: self.values.clone().mul_scalar(1.0),
            positions: self.positions.clone().add_scalar(0),
            log_weights: self.log_weights.as_ref().map(copy),
            tracks: self
                .tracks
                .iter()
                .map(|(name, track)| {
                    let values = copy(&track.values);
                    (name.clone(), Track { initial: track.initial, values })
                })
                .collect(),
            state: self
                .state
                .iter()
                .map(|(name, tensor)| (name.clone(), tensor.clone().mul_scalar(1.0)))
                .collect(),
            limits: self.limits.clone(),
            slot_pairs: OnceLock::new(),
            options: self.options.clone(),
        }
    }
}

pub(crate) fn expect_shape(what: &'static str, actual: &[usize], expected: &[usize]) -> Result<()> {
    if actual == expected {
        return Ok(());
    }
    Err(Error::Shape { what, expected: expected.to_vec(), actual: actual.to_vec() })
}
