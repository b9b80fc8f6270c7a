//! Sketches in host memory, and in files.

use std::collections::BTreeMap;

use burn::tensor::{DType, Tensor};
use kv_core::{Error, LayerCache, Result, SavedState, packed};
use kv_kernels::MAX_BUCKETS;
use serde::{Deserialize, Serialize};

use super::{Sketch, SketchHead, SketchOptions};

/// The header of sketches in a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Header {
    options: SketchOptions,
    heads: Vec<SketchHead>,
    seeds: Vec<[u32; 2]>,
    tokens: usize,
    seen: usize,
}

impl Header {
    /// The shape of entries.
    fn entries(&self, head_dim: usize) -> [usize; 2] {
        let entries =
            self.heads.iter().map(|head| head.entries.saturating_mul(self.options.buckets));
        [entries.fold(0, usize::saturating_add).max(1), head_dim]
    }

    /// The number of scores.
    fn scores(&self) -> usize {
        self.heads.len().saturating_mul(self.tokens.max(1))
    }

    /// Checks that the sketches fit the cache's heads and have room for its tokens.
    fn check(&self, cache: &LayerCache, seen: &[usize]) -> std::result::Result<(), String> {
        let total_kv_heads = cache.layout().head_ranges();
        if self.heads.len() != total_kv_heads || self.seeds.len() != total_kv_heads {
            let (heads, seeds) = (self.heads.len(), self.seeds.len());
            return Err(format!(
                "sketches of {heads} heads and {seeds} seeds, expected {total_kv_heads}"
            ));
        }
        let most = seen.iter().copied().max().unwrap_or_default();
        if self.seen < most || self.seen > self.tokens {
            let (own, tokens) = (self.seen, self.tokens);
            return Err(format!(
                "sketches of {own} tokens seen, room for {tokens}, sequences of {most}"
            ));
        }
        if !(1..=MAX_BUCKETS).contains(&self.options.buckets) {
            return Err(format!("sketches of {} buckets", self.options.buckets));
        }
        if cache.log_weights().is_some() || cache.track(Sketch::SCORES).is_none() {
            let track = Sketch::SCORES;
            return Err(format!("sketches beside weights, or without the track `{track}`"));
        }
        let positions = cache.read_positions().map_err(|error| error.to_string())?;
        let within = |at: &i32| usize::try_from(*at).is_ok_and(|at| at < self.tokens);
        let mut live = cache.layout().live_slots().map(|slot| positions[slot]);
        if let Some(position) = live.find(|at| !within(at)) {
            let tokens = self.tokens;
            return Err(format!("a slot at position {position}, and sketches of {tokens} tokens"));
        }
        Ok(())
    }
}

pub(super) fn save(sketch: &Sketch) -> Result<SavedState> {
    let _work = kv_kernels::device_work();
    let failed = |error: String| Error::Read { what: "sketch", reason: error };
    let floats =
        |tensor: &Tensor<2>| tensor.clone().try_into_data().map_err(|e| failed(e.to_string()));
    let header = Header {
        options: sketch.options,
        heads: sketch.heads.clone(),
        seeds: sketch.seeds.clone(),
        tokens: sketch.tokens,
        seen: sketch.seen,
    };
    let header = serde_json::to_value(header).map_err(|error| failed(error.to_string()))?;
    let scores = sketch.scores.clone().try_into_data();
    let counters = sketch.counters.clone().try_into_data();
    let tensors = [
        ("keys", floats(&sketch.keys)?),
        ("values", floats(&sketch.values)?),
        ("scores", scores.map_err(|error| failed(error.to_string()))?),
        ("moved", counters.map_err(|error| failed(error.to_string()))?),
    ];
    let tensors: BTreeMap<_, _> =
        tensors.into_iter().map(|(name, data)| (name.to_string(), data)).collect();
    Ok(SavedState::of::<Sketch>(header, tensors))
}

pub(super) fn load(mut saved: SavedState, cache: &LayerCache, seen: &[usize]) -> Result<Sketch> {
    let invalid = |reason: String| Error::InvalidPlan { what: "sketch", reason };
    let header = std::mem::take(&mut saved.header);
    let header: Header =
        serde_json::from_value(header).map_err(|error| invalid(error.to_string()))?;
    header.check(cache, seen).map_err(invalid)?;
    let (head_dim, device) = (cache.head_dim(), &cache.options().device);
    let entries = header.entries(head_dim);
    let keys = saved.take("keys", DType::F32, &entries)?;
    let values = saved.take("values", DType::F32, &entries)?;
    let scores = saved.take("scores", DType::F32, &[header.scores()])?;
    let counters = saved.take("moved", DType::I32, &[header.heads.len(), 2])?;
    let Header { options, heads, seeds, tokens, seen } = header;
    let empty = Sketch::new(heads, tokens, head_dim, &seeds, options, device)?;
    let [keys, values] =
        [keys, values].map(|data| packed(Tensor::from_data(data, (device, DType::F32))));
    let scores = Tensor::from_data(scores, (device, DType::F32));
    let counters = Tensor::from_data(counters, (device, DType::I32));
    Ok(Sketch { keys, values, scores, counters, seen, ..empty })
}
