//! Saved caches: one safetensors file with the live slots of every layer, their positions, weights
//! and policy state; what is not a tensor goes into the file's metadata as JSON.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use burn::tensor::{Bytes, DType, Device, TensorData};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, SafeTensorError, TensorView, serialize_to_file};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::layer::state::{HostState, SavedState};
use crate::{Error, HostCache, HostLayer, KvCache, Origin, Result};

const FORMAT: &str = "burn-kv-cache-1";

#[derive(Serialize, Deserialize)]
struct Header {
    format: String,
    seen: Vec<usize>,
    origin: Origin,
    layers: Vec<LayerHeader>,
}

#[derive(Serialize, Deserialize)]
struct LayerHeader {
    kv_heads: usize,
    capacities: Vec<usize>,
    lengths: Vec<usize>,
    head_dim: usize,
    dtype: String,
    weighted: bool,
    growable: bool,
    limits: Option<Vec<usize>>,
    tracks: BTreeMap<String, f32>,
    state: Vec<String>,
    /// Whether write slots are stored as files of earlier versions store them, as the tensor
    /// `next`.
    #[serde(default, skip_serializing)]
    next: bool,
    /// Headers of policies' states, by name.
    #[serde(flatten)]
    states: BTreeMap<String, Value>,
}

impl LayerHeader {
    /// The states with contents. Some files also name states that the cache does not have.
    fn states(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.states.iter().filter(|(_, header)| match header {
            Value::Null | Value::Bool(false) => false,
            Value::Array(items) => !items.is_empty(),
            _ => true,
        })
    }
}

impl KvCache {
    /// Saves the cache; [`Self::load`] continues it with identical output.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Read`]; [`Error::InvalidPlan`] for a cache with a state that no file
    /// holds ([`HostState::Kept`]).
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut states = self.layers.iter().flat_map(|layer| layer.states.live());
        if let Some(state) = states.find(|state| !state.is_savable()) {
            return Err(not_saved(state.name()));
        }
        self.to_host()?.save(path)
    }

    /// Loads a saved cache to a device.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::InvalidFile`].
    pub fn load(path: &Path, device: &Device) -> Result<Self> {
        HostCache::load(path)?.into_device(device)
    }
}

impl HostCache {
    /// Saves the cache.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::InvalidPlan`] for a cache with a state that no file holds.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut tensors: BTreeMap<String, &TensorData> = BTreeMap::new();
        let mut layers = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let mut add = |name: &str, data| tensors.insert(format!("{index}.{name}"), data);
            add("keys", &layer.keys);
            add("values", &layer.values);
            add("positions", &layer.positions);
            if let Some(weights) = &layer.log_weights {
                add("log_weights", weights);
            }
            for (name, (_, data)) in &layer.tracks {
                add(&format!("track.{name}"), data);
            }
            for (name, data) in &layer.state {
                add(&format!("state.{name}"), data);
            }
            let mut states = BTreeMap::new();
            for (name, state) in &layer.states {
                let HostState::Saved(saved) = state else { return Err(not_saved(name)) };
                for (tensor, data) in &saved.tensors {
                    add(&format!("{name}.{tensor}"), data);
                }
                states.insert(name.clone(), saved.header.clone());
            }
            layers.push(LayerHeader {
                kv_heads: layer.kv_heads,
                capacities: layer.capacities.clone(),
                lengths: layer.lengths.clone(),
                head_dim: layer.head_dim,
                dtype: dtype_name(layer.dtype).to_string(),
                weighted: layer.weighted,
                growable: layer.growable,
                limits: layer.limits.clone(),
                tracks: layer
                    .tracks
                    .iter()
                    .map(|(name, (initial, _))| (name.clone(), *initial))
                    .collect(),
                state: layer.state.keys().cloned().collect(),
                next: false,
                states,
            });
        }
        let header = Header {
            format: FORMAT.into(),
            seen: self.seen.clone(),
            origin: self.origin.clone(),
            layers,
        };
        let invalid = |reason: String| Error::InvalidFile { path: path.to_path_buf(), reason };
        let header = serde_json::to_string(&header).map_err(|error| invalid(error.to_string()))?;
        let views = tensors
            .into_iter()
            .map(|(name, data)| {
                let shape = data.shape().iter().copied().collect();
                let view = TensorView::new(file_dtype(data.dtype()), shape, data.bytes())
                    .map_err(|error| invalid(error.to_string()))?;
                Ok((name, view))
            })
            .collect::<Result<Vec<_>>>()?;
        let metadata = HashMap::from([("burn-kv".to_string(), header)]);
        serialize_to_file(views, Some(metadata), path).map_err(|error| Error::Io {
            path: path.to_path_buf(),
            source: match error {
                SafeTensorError::IoError(source) => source,
                error => std::io::Error::other(error),
            },
        })
    }

    /// Loads a saved cache into host memory.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::InvalidFile`] with what is wrong.
    pub fn load(path: &Path) -> Result<Self> {
        let invalid = |reason: String| Error::InvalidFile { path: path.to_path_buf(), reason };
        let bytes =
            std::fs::read(path).map_err(|source| Error::Io { path: path.to_path_buf(), source })?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| invalid(error.to_string()))?;
        let (_, metadata) =
            SafeTensors::read_metadata(&bytes).map_err(|error| invalid(error.to_string()))?;
        let header = metadata
            .metadata()
            .as_ref()
            .and_then(|metadata| metadata.get("burn-kv"))
            .ok_or_else(|| invalid("it holds no cache header".into()))?;
        let header: Header =
            serde_json::from_str(header).map_err(|error| invalid(error.to_string()))?;
        if header.format != FORMAT {
            return Err(invalid(format!("format `{}`, expected `{FORMAT}`", header.format)));
        }
        let read = |name: String, dtype: DType, shape: &[usize]| -> Result<TensorData> {
            let view = file.tensor(&name).map_err(|_| invalid(format!("no tensor `{name}`")))?;
            if view.dtype() != file_dtype(dtype) || (!shape.is_empty() && view.shape() != shape) {
                return Err(invalid(format!(
                    "`{name}` is {:?} {:?}, expected {dtype:?} {shape:?}",
                    view.dtype(),
                    view.shape()
                )));
            }
            let bytes = Bytes::from_bytes_vec(view.data().to_vec());
            Ok(TensorData::from_bytes(bytes, view.shape().to_vec(), dtype))
        };
        let mut layers = Vec::new();
        for (index, layer) in header.layers.into_iter().enumerate() {
            let total_kv_heads = layer.capacities.len();
            let fits = layer.lengths.len() == total_kv_heads
                && layer.kv_heads > 0
                && total_kv_heads == header.seen.len() * layer.kv_heads
                && layer.limits.as_ref().is_none_or(|limits| limits.len() == total_kv_heads)
                && layer.lengths.iter().zip(&layer.capacities).all(|(l, c)| l <= c);
            if !fits {
                return Err(invalid(format!("layer {index}: lengths and capacities do not fit")));
            }
            let dtype = parse_dtype(&layer.dtype)
                .ok_or_else(|| invalid(format!("layer {index}: dtype `{}`", layer.dtype)))?;
            let live: usize = layer.lengths.iter().sum();
            let mut states = saved_states(&file, index, &layer).map_err(&invalid)?;
            if layer.next {
                let shape = [header.seen.len(), layer.kv_heads];
                let slots = read(format!("{index}.next"), DType::I32, &shape)?;
                let tensors = BTreeMap::from([("slots".to_string(), slots)]);
                let saved = SavedState { header: Value::Bool(true), tensors, load: None };
                states.insert("write_slots".into(), HostState::Saved(saved));
            }
            let rows = [live, layer.head_dim];
            layers.push(HostLayer {
                keys: read(format!("{index}.keys"), dtype, &rows)?,
                values: read(format!("{index}.values"), dtype, &rows)?,
                positions: read(format!("{index}.positions"), DType::I32, &[live])?,
                log_weights: layer
                    .weighted
                    .then(|| read(format!("{index}.log_weights"), DType::F32, &[live]))
                    .transpose()?,
                tracks: layer
                    .tracks
                    .into_iter()
                    .map(|(name, initial)| {
                        let data = read(format!("{index}.track.{name}"), DType::F32, &[live])?;
                        Ok((name, (initial, data)))
                    })
                    .collect::<Result<_>>()?,
                state: layer
                    .state
                    .into_iter()
                    .map(|name| {
                        let data = read_state(&file, &format!("{index}.state.{name}"));
                        Ok((name, data.map_err(&invalid)?))
                    })
                    .collect::<Result<_>>()?,
                states,
                kv_heads: layer.kv_heads,
                capacities: layer.capacities,
                lengths: layer.lengths,
                head_dim: layer.head_dim,
                dtype,
                weighted: layer.weighted,
                growable: layer.growable,
                limits: layer.limits,
            });
        }
        Ok(Self { layers, seen: header.seen, origin: header.origin })
    }
}

fn not_saved(name: &str) -> Error {
    let reason = format!("its state `{name}` lives in host memory, and is not saved");
    Error::InvalidPlan { what: "save", reason }
}

/// A state tensor: f32, or i32.
fn read_state(file: &SafeTensors<'_>, name: &str) -> std::result::Result<TensorData, String> {
    let view = file.tensor(name).map_err(|_| format!("no tensor `{name}`"))?;
    let (dtype, shape) = (view.dtype(), view.shape());
    let accepted = match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::I32 => Some(DType::I32),
        _ => None,
    };
    let accepted = accepted.filter(|_| shape.len() == 3);
    let accepted = accepted.ok_or_else(|| {
        format!("`{name}` is {dtype:?} {shape:?}, expected F32 or I32 of 3 dimensions")
    })?;
    let bytes = Bytes::from_bytes_vec(view.data().to_vec());
    Ok(TensorData::from_bytes(bytes, shape.to_vec(), accepted))
}

/// The saved forms of a layer's states. Policies check them when they restore a state.
fn saved_states(
    file: &SafeTensors<'_>,
    index: usize,
    layer: &LayerHeader,
) -> std::result::Result<BTreeMap<String, HostState>, String> {
    let mut states = BTreeMap::new();
    for (name, header) in layer.states() {
        let prefix = format!("{index}.{name}.");
        let mut tensors = BTreeMap::new();
        for (full, view) in file.iter() {
            let Some(tensor) = full.strip_prefix(&prefix) else { continue };
            let dtype = cache_dtype(view.dtype())
                .ok_or_else(|| format!("`{full}` is {:?}, which no cache holds", view.dtype()))?;
            let bytes = Bytes::from_bytes_vec(view.data().to_vec());
            let data = TensorData::from_bytes(bytes, view.shape().to_vec(), dtype);
            tensors.insert(tensor.to_string(), data);
        }
        let saved = SavedState { header: header.clone(), tensors, load: None };
        states.insert(name.clone(), HostState::Saved(saved));
    }
    Ok(states)
}

fn file_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I32 => Dtype::I32,
        _ => Dtype::F32,
    }
}

fn cache_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::I32 => Some(DType::I32),
        _ => None,
    }
}

fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        _ => "f32",
    }
}

fn parse_dtype(name: &str) -> Option<DType> {
    [DType::F32, DType::F16, DType::BF16].into_iter().find(|dtype| dtype_name(*dtype) == name)
}
