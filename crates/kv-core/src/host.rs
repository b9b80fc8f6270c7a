//! The host tier: a cache moved out of the device's memory and back.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::layer::state::{HostState, StoredState};
use crate::layer::{Rows, StateTensor, Track};
use crate::{CacheOptions, KvCache, LayerCache, Origin, Result, SlotLayout};

/// A layer's live slots in host memory.
#[derive(Debug, Clone)]
pub struct HostLayer {
    pub(crate) kv_heads: usize,
    pub(crate) capacities: Vec<usize>,
    pub(crate) lengths: Vec<usize>,
    pub(crate) head_dim: usize,
    pub(crate) dtype: DType,
    pub(crate) weighted: bool,
    pub(crate) growable: bool,
    pub(crate) limits: Option<Vec<usize>>,
    /// `[live, D]`, in the cache's dtype.
    pub(crate) keys: TensorData,
    pub(crate) values: TensorData,
    /// `[live]`
    pub(crate) positions: TensorData,
    pub(crate) log_weights: Option<TensorData>,
    pub(crate) tracks: BTreeMap<String, (f32, TensorData)>,
    pub(crate) state: BTreeMap<String, TensorData>,
    /// Policies' states, by name.
    pub(crate) states: BTreeMap<String, HostState>,
}

/// A whole cache in host memory.
#[derive(Debug, Clone)]
pub struct HostCache {
    pub(crate) layers: Vec<HostLayer>,
    pub(crate) seen: Vec<usize>,
    pub(crate) origin: Origin,
}

impl KvCache {
    /// Moves the cache to host memory; the device's memory is freed. Waits for the device.
    ///
    /// # Errors
    /// [`crate::Error::Read`].
    pub fn into_host(self) -> Result<HostCache> {
        let layers = self.layers.iter().map(HostLayer::read).collect::<Result<_>>()?;
        Ok(HostCache { layers, seen: self.seen, origin: self.origin })
    }

    /// Copies the cache to host memory.
    ///
    /// # Errors
    /// [`crate::Error::Read`].
    pub fn to_host(&self) -> Result<HostCache> {
        let layers = self.layers.iter().map(HostLayer::read).collect::<Result<_>>()?;
        Ok(HostCache { layers, seen: self.seen.clone(), origin: self.origin.clone() })
    }
}

impl HostCache {
    /// Moves the cache to a device; slots keep their order, so that decoding continues identically.
    ///
    /// # Errors
    /// [`crate::Error`] where the data contradict themselves.
    pub fn into_device(self, device: &Device) -> Result<KvCache> {
        let _work = kv_kernels::device_work();
        let layers = self
            .layers
            .into_iter()
            .map(|layer| layer.upload(&self.seen, device))
            .collect::<Result<_>>()?;
        Ok(KvCache { layers, seen: self.seen, origin: self.origin })
    }

    /// The bytes of all slots in host memory, without policies' states.
    pub fn bytes(&self) -> usize {
        let layers = self.layers.iter();
        layers.map(|layer| layer.keys.bytes().len() + layer.values.bytes().len()).sum()
    }
}

impl HostLayer {
    fn read(cache: &LayerCache) -> Result<Self> {
        let layout = cache.layout();
        let rows = cache.read_slots(&cache.live_slots());
        let initial = cache.tracks.values().map(|track| track.initial);
        let tracks = rows
            .tracks
            .into_iter()
            .zip(initial)
            .map(|((name, values), initial)| Ok((name, (initial, read("track", values)?))));
        let state = cache.state.iter();
        Ok(Self {
            kv_heads: layout.kv_heads(),
            capacities: layout.capacities().to_vec(),
            lengths: layout.lengths().to_vec(),
            head_dim: cache.head_dim(),
            dtype: cache.options().dtype,
            weighted: cache.log_weights().is_some(),
            growable: cache.options().growable,
            limits: cache.limits.clone(),
            keys: read("keys", rows.keys)?,
            values: read("values", rows.values)?,
            positions: read_int("positions", rows.positions)?,
            log_weights: rows.log_weights.map(|weights| read("weights", weights)).transpose()?,
            tracks: tracks.collect::<Result<_>>()?,
            state: state
                .map(|(name, own)| Ok((name.clone(), own.to_host()?)))
                .collect::<Result<_>>()?,
            states: host_states(cache)?,
        })
    }

    fn upload(self, seen: &[usize], device: &Device) -> Result<LayerCache> {
        let options = CacheOptions {
            device: device.clone(),
            dtype: self.dtype,
            weighted: self.weighted,
            growable: self.growable,
        };
        let layout = SlotLayout::new(self.kv_heads, self.capacities);
        let mut cache = LayerCache::new(layout, self.head_dim, options);
        for (name, (initial, _)) in &self.tracks {
            cache.tracks.insert(name.clone(), Track::new(*initial, cache.slots(), device));
        }
        cache.set_lengths(self.lengths);
        cache.limits = self.limits;
        if cache.layout().used() > 0 {
            let float = |data: TensorData| Tensor::from_data(data, (device, DType::F32));
            let tracks = self.tracks.into_iter();
            let rows = Rows {
                keys: Tensor::from_data(self.keys, (device, self.dtype)),
                values: Tensor::from_data(self.values, (device, self.dtype)),
                positions: Tensor::from_data(self.positions, (device, DType::I32)),
                log_weights: self.log_weights.map(float),
                tracks: tracks.map(|(name, (_, data))| (name, float(data))).collect(),
            };
            cache.write_slots(&cache.live_slots(), rows)?;
        }
        for (name, data) in self.state {
            cache.state.insert(name, StateTensor::from_host(data, device));
        }
        for (name, state) in self.states {
            let stored = match state {
                HostState::Kept(state) => match state.to_device(device) {
                    Some(state) => StoredState::State(state),
                    None => continue,
                },
                HostState::Saved(saved) => match saved.load {
                    Some(load) => StoredState::State(load(saved, &cache, seen)?),
                    None => StoredState::Saved(saved, seen.to_vec()),
                },
            };
            cache.states.0.insert(name, stored);
        }
        Ok(cache)
    }
}

/// The states of a cache in host memory.
fn host_states(cache: &LayerCache) -> Result<BTreeMap<String, HostState>> {
    let mut states = BTreeMap::new();
    for (name, stored) in &cache.states.0 {
        let state = match stored {
            StoredState::State(state) => state.to_host()?,
            StoredState::Saved(saved, _) => Some(HostState::Saved(saved.clone())),
        };
        if let Some(state) = state {
            states.insert(name.clone(), state);
        }
    }
    Ok(states)
}

fn read<const D: usize>(what: &'static str, tensor: Tensor<D>) -> Result<TensorData> {
    let _work = kv_kernels::device_work();
    let data = tensor.try_into_data();
    data.map_err(|error| crate::Error::Read { what, reason: error.to_string() })
}

fn read_int<const D: usize>(what: &'static str, tensor: Tensor<D, Int>) -> Result<TensorData> {
    let _work = kv_kernels::device_work();
    let data = tensor.try_into_data();
    data.map_err(|error| crate::Error::Read { what, reason: error.to_string() })
}
