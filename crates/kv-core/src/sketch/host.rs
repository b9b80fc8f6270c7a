//! Sketches in host memory, and in files.

use burn::tensor::{DType, Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::{Sketch, SketchHead, SketchOptions};
use crate::tensors::packed;
use crate::{Error, Result};

/// A layer's sketches in host memory.
#[derive(Debug, Clone)]
pub(crate) struct HostSketch {
    pub(crate) header: SketchHeader,
    /// Keys and values, `[N, D]`, f32.
    pub(crate) entries: [TensorData; 2],
    /// `[B * Hkv * tokens]`, f32.
    pub(crate) scores: TensorData,
    /// `[B * Hkv, 2]`, 32-bit.
    pub(crate) moved: TensorData,
}

/// What a file says of sketches besides their tensors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SketchHeader {
    pub(crate) options: SketchOptions,
    pub(crate) heads: Vec<SketchHead>,
    pub(crate) seeds: Vec<[u32; 2]>,
    pub(crate) tokens: usize,
    pub(crate) seen: usize,
}

impl SketchHeader {
    /// The shape of entries.
    pub(crate) fn entries(&self, head_dim: usize) -> [usize; 2] {
        let entries =
            self.heads.iter().map(|head| head.entries.saturating_mul(self.options.buckets));
        [entries.fold(0, usize::saturating_add).max(1), head_dim]
    }

    /// The number of scores.
    pub(crate) fn scores(&self) -> usize {
        self.heads.len().saturating_mul(self.tokens.max(1))
    }
}

impl HostSketch {
    pub(crate) fn read(sketch: &Sketch) -> Result<Self> {
        let _work = kv_kernels::device_work();
        let failed = |error: String| Error::Read { what: "sketch", reason: error };
        let floats =
            |tensor: Tensor<2>| tensor.try_into_data().map_err(|error| failed(error.to_string()));
        let scores = sketch.scores.clone().try_into_data();
        let moved = sketch.moved.clone().try_into_data();
        Ok(Self {
            header: SketchHeader {
                options: sketch.options,
                heads: sketch.heads.clone(),
                seeds: sketch.seeds.clone(),
                tokens: sketch.tokens,
                seen: sketch.seen,
            },
            entries: [floats(sketch.keys.clone())?, floats(sketch.values.clone())?],
            scores: scores.map_err(|error| failed(error.to_string()))?,
            moved: moved.map_err(|error| failed(error.to_string()))?,
        })
    }

    pub(crate) fn upload(self, head_dim: usize, device: &Device) -> Result<Sketch> {
        let SketchHeader { options, heads, seeds, tokens, seen } = self.header;
        let empty = Sketch::new(heads, tokens, head_dim, &seeds, options, device)?;
        let [keys, values] =
            self.entries.map(|data| packed(Tensor::from_data(data, (device, DType::F32))));
        let scores = Tensor::from_data(self.scores, (device, DType::F32));
        let moved = Tensor::from_data(self.moved, (device, DType::I32));
        Ok(Sketch { keys, values, scores, moved, seen, ..empty })
    }
}
