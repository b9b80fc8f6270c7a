//! Saved caches: one safetensors file with the live slots of every layer, their positions, weights
//! and policy state; what is not a tensor goes into the file's metadata as JSON.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use burn::tensor::{Bytes, DType, Device, TensorData};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde::{Deserialize, Serialize};

use crate::layer::{ACCUMULATED, LOG_NORMS};
use crate::sets::HostSets;
use crate::sketch::{HostSketch, SketchHeader};
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
    /// Whether places of the next tokens are stored.
    #[serde(default)]
    next: bool,
    #[serde(default)]
    sketch: Option<SketchHeader>,
    /// The shape of the index sets' vectors, and integers of a row of their table.
    #[serde(default)]
    sets: Option<([usize; 4], usize)>,
    /// Slots of a page, for each size of pages whose bounds are kept.
    #[serde(default)]
    pages: Vec<usize>,
}

impl KvCache {
    /// Saves the cache; [`Self::load`] continues it with identical output.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Read`]; [`Error::InvalidPlan`] for a cache with an
    /// [`crate::Archive`], which is not saved.
    pub fn save(&self, path: &Path) -> Result<()> {
        // Before anything is read.
        check_saved(self.layers.iter().any(|layer| layer.archive().is_some()))?;
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
    /// [`Error::Io`], [`Error::InvalidPlan`] for a cache with an [`crate::Archive`].
    pub fn save(&self, path: &Path) -> Result<()> {
        check_saved(self.layers.iter().any(|layer| layer.archive.is_some()))?;
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
            if let Some(next) = &layer.next {
                add("next", next);
            }
            if let Some(sketch) = &layer.sketch {
                let [keys, values] = &sketch.entries;
                add("sketch.keys", keys);
                add("sketch.values", values);
                add("sketch.scores", &sketch.scores);
                add("sketch.moved", &sketch.moved);
            }
            if let Some(sets) = &layer.sets {
                add("sets.table", &sets.table);
                add("sets.vectors", &sets.vectors);
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
                next: layer.next.is_some(),
                sketch: layer.sketch.as_ref().map(|sketch| sketch.header.clone()),
                sets: layer.sets.as_ref().map(|sets| (sets.shape, sets.table.shape()[1])),
                pages: layer.pages.clone(),
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
            source: std::io::Error::other(error),
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
            let pairs = layer.capacities.len();
            let fits = layer.lengths.len() == pairs
                && layer.kv_heads > 0
                && !layer.pages.contains(&0)
                && pairs == header.seen.len() * layer.kv_heads
                && layer.limits.as_ref().is_none_or(|limits| limits.len() == pairs)
                && layer.lengths.iter().zip(&layer.capacities).all(|(l, c)| l <= c);
            if !fits {
                return Err(invalid(format!("layer {index}: lengths and capacities do not fit")));
            }
            let dtype = parse_dtype(&layer.dtype)
                .ok_or_else(|| invalid(format!("layer {index}: dtype `{}`", layer.dtype)))?;
            let live: usize = layer.lengths.iter().sum();
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
                        let data = read(format!("{index}.state.{name}"), DType::F32, &[])?;
                        Ok((name, data))
                    })
                    .collect::<Result<_>>()?,
                archive: None,
                pages: layer.pages,
                sketch: layer
                    .sketch
                    .map(|header| {
                        let entries = header.entries(layer.head_dim);
                        let float = |name: &str, shape: &[usize]| {
                            read(format!("{index}.sketch.{name}"), DType::F32, shape)
                        };
                        let moved = format!("{index}.sketch.moved");
                        if header.heads.len() != pairs || header.seeds.len() != pairs {
                            return Err(invalid(format!("layer {index}: its sketches do not fit")));
                        }
                        Ok(HostSketch {
                            entries: [float("keys", &entries)?, float("values", &entries)?],
                            scores: float("scores", &[header.scores()])?,
                            moved: read(moved, DType::I32, &[pairs, 2])?,
                            header,
                        })
                    })
                    .transpose()?,
                sets: layer
                    .sets
                    .map(|(shape, row)| {
                        if shape[0] == 0 || !shape[0].is_multiple_of(pairs) {
                            return Err(invalid(format!(
                                "layer {index}: its index sets do not fit"
                            )));
                        }
                        let table = format!("{index}.sets.table");
                        let vectors = format!("{index}.sets.vectors");
                        Ok(HostSets {
                            table: read(table, DType::I32, &[shape[0], row])?,
                            vectors: read(vectors, DType::F32, &shape)?,
                            shape,
                        })
                    })
                    .transpose()?,
                next: layer
                    .next
                    .then(|| {
                        let shape = [header.seen.len(), layer.kv_heads];
                        read(format!("{index}.next"), DType::I32, &shape)
                    })
                    .transpose()?,
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
        for (index, layer) in layers.iter().enumerate() {
            check_places(layer)
                .and_then(|()| check_sketch(layer, &header.seen))
                .map_err(|reason| invalid(format!("layer {index}: {reason}")))?;
        }
        Ok(Self { layers, seen: header.seen, origin: header.origin })
    }
}

/// Refuses caches that keep all tokens beside them.
fn check_saved(archived: bool) -> Result<()> {
    if archived {
        let reason = "it keeps all tokens in host memory, which are not saved".into();
        return Err(Error::InvalidPlan { what: "save", reason });
    }
    Ok(())
}

/// Checks where a layer's next tokens go: the device will not.
fn check_places(layer: &HostLayer) -> std::result::Result<(), String> {
    let Some(next) = &layer.next else { return Ok(()) };
    let limits = layer.limits.as_ref().ok_or("places without limits")?;
    if !layer.tracks.contains_key(LOG_NORMS) {
        return Err(format!("places without the track `{LOG_NORMS}`"));
    }
    let places = next.as_slice::<i32>().map_err(|error| error.to_string())?;
    let heads = places.iter().zip(&layer.lengths).zip(limits).enumerate();
    for (head, ((&place, &length), &limit)) in heads {
        let within = usize::try_from(place)
            .is_ok_and(|place| place < length || (place == length && length < limit));
        if !within {
            return Err(format!("place {place} of head {head}, which holds {length} of {limit}"));
        }
    }
    Ok(())
}

/// Checks that a layer's sketches have room for its tokens, and heads for theirs.
fn check_sketch(layer: &HostLayer, seen: &[usize]) -> std::result::Result<(), String> {
    let Some(HostSketch { header, .. }) = &layer.sketch else { return Ok(()) };
    let most = seen.iter().copied().max().unwrap_or_default();
    if header.seen < most || header.seen > header.tokens {
        let (own, tokens) = (header.seen, header.tokens);
        return Err(format!(
            "sketches of {own} tokens seen, room for {tokens}, sequences of {most}"
        ));
    }
    if !(1..=kv_kernels::MAX_BUCKETS).contains(&header.options.buckets) {
        return Err(format!("sketches of {} buckets", header.options.buckets));
    }
    if layer.weighted || !layer.tracks.contains_key(ACCUMULATED) {
        return Err(format!("sketches beside weights, or without the track `{ACCUMULATED}`"));
    }
    let positions = layer.positions.as_slice::<i32>().map_err(|error| error.to_string())?;
    let within = |at: &&i32| usize::try_from(**at).is_ok_and(|at| at < header.tokens);
    if let Some(position) = positions.iter().find(|at| !within(at)) {
        let tokens = header.tokens;
        return Err(format!("a slot at position {position}, and sketches of {tokens} tokens"));
    }
    Ok(())
}

fn file_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I32 => Dtype::I32,
        _ => Dtype::F32,
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
