//! Fisher information of the key and value projections: how much each layer's cache matters.

mod windows;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use burn::tensor::Tensor;
use kv_core::{LayerAllocation, read_f32};
use serde::{Deserialize, Serialize};

use crate::error::{FisherError, ModelError, Result};
use crate::{Model, measured};
pub use windows::TextWindows;

/// The file's name beside a model's own.
const FILE: &str = "fisher.json";

/// Fisher information of every layer's key and value projections, from which KVReviver (appendix
/// "Fisher Information") takes how the layers share a budget.
///
/// It is the diagonal of the empirical Fisher information: for each window of a text the gradient
/// of the mean negative log-likelihood of its tokens is squared and summed over a matrix, and the
/// mean is taken over the windows. Only its ratios between layers mean something.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fisher {
    /// The model's fingerprint.
    pub model: String,
    /// The text's name.
    pub text: String,
    /// Tokens of a window.
    pub window: usize,
    /// Windows.
    pub samples: usize,
    /// The information of each layer.
    pub layers: Vec<LayerFisher>,
}

/// Fisher information of one layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerFisher {
    /// The information of the weights of keys.
    pub keys: f32,
    /// The information of the weights of values.
    pub values: f32,
}

impl LayerFisher {
    /// The sum over keys and values.
    pub fn sum(&self) -> f64 {
        f64::from(self.keys) + f64::from(self.values)
    }
}

impl Fisher {
    /// Measures a model on windows of a text called `text`. `done` is called behind each window.
    ///
    /// # Errors
    /// The errors of [`crate::Llama::kv_gradients`]; [`FisherError::NonFinite`].
    pub fn measure(
        model: &Model,
        text: &str,
        windows: &TextWindows,
        mut done: impl FnMut(),
    ) -> Result<Self> {
        let mut sums = vec![[0.0; 2]; model.config().num_layers];
        let samples = windows.tokens.len();
        for (index, window) in windows.tokens.iter().enumerate() {
            let gradients = model.llama().kv_gradients(window)?;
            let squares = gradients.layers.into_iter().flatten().map(|one| one.square().sum());
            let squares = read_f32("Fisher information", Tensor::cat(squares.collect(), 0))?;
            if squares.iter().any(|square| !square.is_finite()) {
                return Err(FisherError::NonFinite { window: index }.into());
            }
            for ([keys, values], pair) in sums.iter_mut().zip(squares.chunks(2)) {
                *keys += f64::from(pair[0]) / samples as f64;
                *values += f64::from(pair[1]) / samples as f64;
            }
            done();
        }
        let layer =
            |[keys, values]: [f64; 2]| LayerFisher { keys: keys as f32, values: values as f32 };
        let layers = sums.into_iter().map(layer).collect();
        let window = windows.tokens.first().map_or(0, Vec::len);
        Ok(Self { model: model.fingerprint()?, text: text.into(), window, samples, layers })
    }

    /// Every layer's share of the sum over layers; shares sum to 1.
    pub fn shares(&self) -> Vec<f64> {
        let sum: f64 = self.layers.iter().map(LayerFisher::sum).sum();
        self.layers.iter().map(|layer| layer.sum() / sum).collect()
    }

    /// Budgets in proportion to the information, for a model of `layers` layers.
    ///
    /// # Errors
    /// [`FisherError::WrongLayers`] where another number of layers was measured.
    pub fn allocation(&self, layers: usize) -> Result<LayerAllocation> {
        if self.layers.len() != layers {
            let (model, actual) = (self.model.clone(), self.layers.len());
            return Err(FisherError::WrongLayers { model, expected: layers, actual }.into());
        }
        Ok(LayerAllocation::Weights(self.shares()))
    }

    /// The path of a model's Fisher information: `fisher.json` in its local folder.
    ///
    /// # Errors
    /// [`FisherError::NoFolder`] for models without a local folder.
    pub fn beside(model: &str) -> Result<PathBuf> {
        measured::beside(model, FILE)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`FisherError::Missing`], [`ModelError::Io`]; [`ModelError::InvalidJson`] also for numbers
    /// that cannot be Fisher information.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => FisherError::Missing { path: path.into() }.into(),
            _ => ModelError::io(path, source),
        })?;
        let file = || path.display().to_string();
        let invalid = |reason: String| ModelError::InvalidJson { file: file(), reason };
        let fisher: Self = serde_json::from_str(&text).map_err(|e| invalid(e.to_string()))?;
        let numbers = fisher.layers.iter().flat_map(|layer| [layer.keys, layer.values]);
        let valid = numbers.clone().all(|x| x >= 0.0) && numbers.sum::<f32>() > 0.0;
        match valid {
            true => Ok(fisher),
            false => Err(invalid("expected numbers of at least 0, not all of them 0".into())),
        }
    }

    /// Writes a file.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        measured::write(path.as_ref(), serde_json::to_string_pretty(self))
    }
}
