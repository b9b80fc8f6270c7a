//! One layer's cache: its pool of slots, and the methods that read it. The submodules have the
//! methods that change slots.

mod arena;
mod attend;
mod capacity;
mod evict;
mod fullness;
mod layout_tensors;
mod memory;
mod merge;
mod options;
mod replace;
mod rotate;
mod scores;
mod slots;
pub(crate) mod state;
mod state_tensor;
mod tracks;
mod write;

use std::collections::BTreeMap;
use std::sync::OnceLock;

use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::SlotRanges;

use crate::tensors::{ints, packed, read_f32, read_i32, zero_rows};
use crate::{Error, Result, SlotLayout};
use state::States;

pub use attend::NUMERATORS;
use fullness::RangeSlots;
pub use fullness::{FullRange, Fullness, LeavingSlots};
pub(crate) use layout_tensors::LayoutTensors;
pub use options::{CacheOptions, Room};
pub(crate) use slots::Rows;
pub(crate) use state_tensor::StateTensor;
pub(crate) use tracks::Track;

/// One layer's slots, in a head range for every key-value head of every sequence of a batch.
///
/// Policies keep numbers of their own beside the slots: *tracks* (one f32 a slot, such as
/// accumulated attention) follow every append, move, selection and merge; *state* tensors belong to
/// the layer as a whole. Both are saved with the cache.
///
/// The cache owns its tensors, writes into them in place, and lends them only by reference. `Clone`
/// copies deeply.
///
/// ```
/// use burn::tensor::{DType, Device, Distribution, Tensor};
/// use kv_core::{CacheOptions, LayerCache, SlotLayout};
///
/// // One sequence, two key-value heads with room for 4 and 2 slots, head dim 8.
/// let device = Device::flex();
/// let layout = SlotLayout::new(2, vec![4, 2]);
/// let mut cache = LayerCache::new(layout, 8, CacheOptions::new(&device, DType::F32));
/// let token = Tensor::<3>::random([1, 2, 8], Distribution::Default, &device);
/// cache.append(token.clone(), token.clone(), Tensor::zeros([1], (&device, DType::I32)))?;
/// cache.append(token.clone(), token, Tensor::ones([1], (&device, DType::I32)))?;
/// assert_eq!(cache.layout().lengths(), [2, 2]);
///
/// // Evict each head's older token where it holds more than its limit.
/// let ages = cache.positions().clone().float();
/// let victims = cache.lowest_slots(ages)?;
/// cache.evict_slots(victims, &[2, 1])?;
/// assert_eq!(cache.layout().lengths(), [2, 1]);
/// # Ok::<(), kv_core::Error>(())
/// ```
#[derive(Debug)]
pub struct LayerCache {
    pub(crate) layout: SlotLayout,
    pub(crate) ranges: SlotRanges,
    pub(crate) keys: Tensor<2>,
    pub(crate) values: Tensor<2>,
    pub(crate) positions: Tensor<1, Int>,
    pub(crate) log_weights: Option<Tensor<1>>,
    pub(crate) tracks: BTreeMap<String, Track>,
    pub(crate) state: BTreeMap<String, StateTensor>,
    /// Slots that a policy lets each head hold after a decode step, `[B * Hkv]`.
    pub(crate) limits: Option<Vec<usize>>,
    /// What policies keep beside the slots, in types of their own.
    pub(crate) states: States,
    /// The head range of every slot, `[S]`, made when first asked for.
    pub(crate) slot_ranges: OnceLock<Tensor<1, Int>>,
    /// Where the slots of each head range are, made when first asked for.
    pub(crate) range_slots: OnceLock<RangeSlots>,
    /// A flag for every head, `[B, Hkv]`, made when first asked for.
    pub(crate) every_head: OnceLock<Tensor<2, Int>>,
    pub(crate) options: CacheOptions,
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
            keys: zero_rows(slots, head_dim, &device, dtype),
            values: zero_rows(slots, head_dim, &device, dtype),
            positions: Tensor::zeros([slots], (&device, DType::I32)),
            log_weights: options.weighted.then(|| Tensor::zeros([slots], (&device, DType::F32))),
            tracks: BTreeMap::new(),
            state: BTreeMap::new(),
            limits: None,
            states: States::default(),
            slot_ranges: OnceLock::new(),
            range_slots: OnceLock::new(),
            every_head: OnceLock::new(),
            layout,
            options,
        }
    }

    /// The head ranges as the host knows them.
    pub fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    /// The head ranges on the device: offsets and lengths, `[B, Hkv]`.
    pub fn ranges(&self) -> &SlotRanges {
        &self.ranges
    }

    /// Options that the cache was built with.
    pub fn options(&self) -> &CacheOptions {
        &self.options
    }

    /// The head dim, `D`.
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

    /// All slots' logical positions, read to the host.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn read_positions(&self) -> Result<Vec<i32>> {
        read_i32("positions", self.positions.clone())
    }

    /// All slots' log-weights `ln w`, `[S]`; `None` where every weight is 1.
    pub fn log_weights(&self) -> Option<&Tensor<1>> {
        self.log_weights.as_ref()
    }

    /// Replaces the weights. `log_weights` is `[S]`, f32.
    ///
    /// # Errors
    /// [`Error::Shape`] for another length.
    fn set_log_weights(&mut self, log_weights: Tensor<1>) -> Result<()> {
        expect_shape("log_weights", &log_weights.dims(), &[self.slots()])?;
        self.options.weighted = true;
        self.log_weights = Some(log_weights);
        Ok(())
    }

    /// Sets the log-weights from one value a live slot.
    ///
    /// # Errors
    /// The errors of [`Self::set_live_track`].
    pub fn set_live_log_weights(&mut self, live: &[f32]) -> Result<()> {
        let values = self.spread_live(live, 0.0)?;
        self.set_log_weights(values)
    }

    /// All slots' weights `w`, read to the host.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn read_weights(&self) -> Result<Vec<f32>> {
        match &self.log_weights {
            Some(weights) => read_f32("log_weights", weights.clone().exp()),
            None => Ok(vec![1.0; self.slots()]),
        }
    }

    /// The index of the head range that each slot of the pool belongs to, `[S]`.
    pub fn slot_ranges(&self) -> &Tensor<1, Int> {
        self.slot_ranges.get_or_init(|| {
            let slots = self.slots();
            let capacities = self.layout.capacities().iter().enumerate();
            let mut ranges: Vec<i32> = capacities
                .flat_map(|(range, &capacity)| std::iter::repeat_n(range as i32, capacity))
                .collect();
            ranges.resize(slots, 0);
            ints(ranges, [slots], &self.options.device)
        })
    }

    /// Every head's newest slot: keys and values `[B, Hkv, D]`. Empty heads give arbitrary rows.
    pub fn newest(&self) -> [Tensor<3>; 2] {
        let [batch, kv_heads] = [self.layout.batch(), self.layout.kv_heads()];
        let last = (self.ranges.offsets.clone() + self.ranges.lengths.clone()).sub_scalar(1);
        let last = last.reshape([batch * kv_heads]).clamp_min(0);
        let shape = [batch, kv_heads, self.head_dim()];
        [&self.keys, &self.values].map(|pool| pool.clone().select(0, last.clone()).reshape(shape))
    }

    /// Moves the cache to another device. Every slot keeps its index.
    pub fn to_device(self, device: &Device) -> Self {
        let floats = |tensor: Tensor<1>| tensor.to_device(device);
        let tracks = self.tracks.into_iter().map(|(name, track)| {
            let values = floats(track.values);
            (name, Track { initial: track.initial, values })
        });
        let state = self.state.iter();
        Self {
            ranges: self.layout.to_device(device),
            keys: packed(self.keys.to_device(device)),
            values: packed(self.values.to_device(device)),
            positions: self.positions.to_device(device),
            log_weights: self.log_weights.map(floats),
            tracks: tracks.collect(),
            state: state.map(|(name, own)| (name.clone(), own.to_device(device))).collect(),
            states: self.states.map(|state| state.to_device(device)),
            slot_ranges: OnceLock::new(),
            range_slots: OnceLock::new(),
            every_head: OnceLock::new(),
            options: CacheOptions { device: device.clone(), ..self.options },
            ..self
        }
    }

    /// The slots of the pool, `S`.
    pub(crate) fn slots(&self) -> usize {
        self.keys.dims()[0]
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
            keys: packed(self.keys.clone().mul_scalar(1.0)),
            values: packed(self.values.clone().mul_scalar(1.0)),
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
            state: self.state.iter().map(|(name, own)| (name.clone(), own.copied())).collect(),
            limits: self.limits.clone(),
            states: self.states.map(|state| state.copied()),
            slot_ranges: OnceLock::new(),
            range_slots: OnceLock::new(),
            every_head: OnceLock::new(),
            options: self.options.clone(),
        }
    }
}

/// Refuses a tensor of another shape than the expected one.
///
/// # Errors
/// [`Error::Shape`] with both shapes.
pub fn expect_shape(what: &'static str, actual: &[usize], expected: &[usize]) -> Result<()> {
    if actual == expected {
        return Ok(());
    }
    Err(Error::Shape { what, expected: expected.to_vec(), actual: actual.to_vec() })
}
