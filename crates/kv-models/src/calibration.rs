//! The channels of queries and keys that matter most, measured on a text. Double Sparsity and
//! HShare approximate attention by them.

use std::path::{Path, PathBuf};

use burn::tensor::Tensor;
use kv_core::read_f32;
use kv_policies::{ChannelStatistic, Needs, by_importance};
use serde::{Deserialize, Serialize};

use crate::{Model, ModelError, PrefillPass, Result, TextWindows, measured};

/// The file's name beside a model's own.
const FILE: &str = "channels.json";

/// Every layer's and head's channels, the most important first, as `"channels": "FILE"` of a policy
/// takes them: Double Sparsity's offline calibration (Yang et al., 2024, section 3.1).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// The model's fingerprint.
    pub model: String,
    /// The text's name.
    pub text: String,
    /// The statistic that ranks channels, by its mean over all tokens of all windows.
    pub statistic: ChannelStatistic,
    /// Tokens of a window.
    pub window: usize,
    /// Windows.
    pub samples: usize,
    /// `[layers][heads][D]`: query heads, or key-value heads for the statistic of keys.
    pub layers: Vec<Vec<Vec<u32>>>,
}

impl Calibration {
    /// Measures a model on windows of a text called `text`. `done` is called behind each window.
    ///
    /// # Errors
    /// The errors of [`crate::Llama::prefill`]; [`ModelError::NonFinite`] with the window.
    pub fn measure(
        model: &Model,
        text: &str,
        windows: &TextWindows,
        statistic: ChannelStatistic,
        mut done: impl FnMut(),
    ) -> Result<Self> {
        let mut sums: Vec<Vec<f64>> = vec![Vec::new(); model.config().num_layers];
        for (index, window) in windows.tokens().iter().enumerate() {
            let needs = Needs { window: window.len(), ..Needs::default() };
            let pass = PrefillPass { needs, ..PrefillPass::default() };
            let mut means: Vec<Tensor<3>> = Vec::new();
            model.llama().prefill(&[window], pass, &mut |observation| {
                let queries = observation.last_queries("calibrate", window.len())?;
                means.push(statistic.mean(&queries, observation.keys));
                Ok(None)
            })?;
            for (sums, mean) in sums.iter_mut().zip(means) {
                let mean = read_f32("channels", mean)?;
                if mean.iter().any(|number| !number.is_finite()) {
                    return Err(ModelError::NonFinite { step: index });
                }
                sums.resize(mean.len(), 0.0);
                sums.iter_mut().zip(mean).for_each(|(sum, mean)| *sum += f64::from(mean));
            }
            done();
        }
        let head_dim = model.config().head_dim;
        let samples = windows.tokens().len();
        let layers = sums.into_iter().map(|sums| {
            let means: Vec<f32> =
                sums.into_iter().map(|sum| (sum / samples as f64) as f32).collect();
            by_importance(&means, head_dim, head_dim)
        });
        Ok(Self {
            model: model.fingerprint()?,
            text: text.into(),
            statistic,
            window: windows.tokens().first().map_or(0, Vec::len),
            samples,
            layers: layers.collect(),
        })
    }

    /// The path of a model's calibration: `channels.json` in its local folder.
    ///
    /// # Errors
    /// [`crate::FisherError::NoFolder`] for models without a local folder.
    pub fn beside(model: &str) -> Result<PathBuf> {
        measured::beside(model, FILE)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let read = || Ok(serde_json::from_str(&std::fs::read_to_string(path)?)?);
        read().map_err(|source| ModelError::io(path, source))
    }

    /// Whether this is the calibration of `model`, whatever its name is now.
    ///
    /// # Errors
    /// Where the model's weights cannot be read from the device.
    pub fn is_of(&self, model: &Model) -> Result<bool> {
        let weights = |name: &str| name.rsplit_once(" (").map(|(_, weights)| weights.to_owned());
        Ok(weights(&self.model) == weights(&model.fingerprint()?))
    }

    /// Writes a file.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        measured::write(path.as_ref(), serde_json::to_string(self))
    }
}
