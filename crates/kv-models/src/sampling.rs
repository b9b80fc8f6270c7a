//! How the next token is chosen from logits.

use kv_kernels::DrawSettings;
use serde::{Deserialize, Serialize};

use crate::error::{ModelError, Result};

/// How the next token is chosen. The fields apply in their order, as in Hugging Face's `generate`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sampling {
    /// Makes tokens less likely that are in the prompt or were generated: a positive logit is
    /// divided by it, a negative one multiplied, once a token. 1 changes nothing, less than 1 makes
    /// them likelier. Steps with a penalty are not recorded.
    pub repetition_penalty: f64,
    /// Divides the logits; 0 takes the likeliest token (the lowest id of equals) and makes the
    /// fields below irrelevant.
    pub temperature: f64,
    /// Only the `k` likeliest tokens, `k >= 1`.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens that together reach this probability, in `(0, 1]`.
    pub top_p: Option<f64>,
    /// Only tokens of at least this fraction of the likeliest one's probability, in `[0, 1]`.
    pub min_p: Option<f64>,
    /// Seed of the request's own random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            repetition_penalty: 1.0,
            temperature: 0.0,
            top_k: None,
            top_p: None,
            min_p: None,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Always the likeliest token.
    pub fn greedy() -> Self {
        Self::default()
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`ModelError::InvalidSampling`] for the first field outside its range.
    pub fn validate(&self) -> Result<()> {
        let invalid = |parameter, value: String, expected| {
            Err(ModelError::InvalidSampling { parameter, value, expected })
        };
        if !(self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0) {
            return invalid(
                "repetition_penalty",
                self.repetition_penalty.to_string(),
                "a finite number above 0",
            );
        }
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return invalid(
                "temperature",
                self.temperature.to_string(),
                "a finite number, at least 0",
            );
        }
        if self.top_k == Some(0) {
            return invalid("top_k", "0".into(), "at least 1");
        }
        match (self.top_p, self.min_p) {
            (Some(p), _) if !(p > 0.0 && p <= 1.0) => {
                invalid("top_p", p.to_string(), "above 0, at most 1")
            }
            (_, Some(p)) if !(0.0..=1.0).contains(&p) => {
                invalid("min_p", p.to_string(), "from 0 to 1")
            }
            _ => Ok(()),
        }
    }

    /// The checked settings as the device takes them, in f32.
    pub(crate) fn settings(&self) -> Result<DrawSettings> {
        self.validate()?;
        Ok(DrawSettings {
            temperature: self.temperature as f32,
            top_k: self.top_k,
            top_p: self.top_p.map(|p| p as f32),
            min_p: self.min_p.map(|p| p as f32),
            seed: self.seed,
        })
    }
}

#[cfg(test)]
mod tests;
