//! From logits to the next token.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::error::{ModelError, Result};

/// How the next token is chosen. The restrictions apply in the order of the fields, as in Hugging
/// Face's `generate`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token (the lowest id of equals) and makes the
    /// other fields irrelevant.
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
}

/// Chooses the tokens of one request; its random numbers depend on nothing else.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    rng: ChaCha8Rng,
    step: usize,
}

/// A token that may be chosen, and its probability up to a common factor.
#[derive(Clone, Copy)]
struct Candidate {
    id: u32,
    weight: f64,
}

impl Sampler {
    /// Starts a request.
    ///
    /// # Errors
    /// [`ModelError::InvalidSampling`].
    pub fn new(sampling: Sampling) -> Result<Self> {
        sampling.validate()?;
        Ok(Self { sampling, rng: ChaCha8Rng::seed_from_u64(sampling.seed), step: 0 })
    }

    /// Chooses the next token from the logits of the whole vocabulary, `[V]`.
    ///
    /// # Errors
    /// [`ModelError::NonFinite`] if a logit is NaN or infinite; [`ModelError::EmptyLogits`].
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        let step = self.step;
        if !logits.iter().all(|logit| logit.is_finite()) {
            return Err(ModelError::NonFinite { step });
        }
        let (best, max) = argmax(logits).ok_or(ModelError::EmptyLogits)?;
        self.step += 1;
        if self.sampling.temperature == 0.0 {
            return Ok(best);
        }
        let candidates = self.candidates(logits, f64::from(max));
        let total: f64 = candidates.iter().map(|c| c.weight).sum();
        let mut left = self.rng.random::<f64>() * total;
        for candidate in &candidates {
            left -= candidate.weight;
            if left < 0.0 {
                return Ok(candidate.id);
            }
        }
        // Rounding may leave a rest after the last candidate.
        Ok(candidates.iter().rev().find(|c| c.weight > 0.0).map_or(best, |c| c.id))
    }

    /// The tokens that pass all restrictions; never none, since the likeliest passes each.
    fn candidates(&self, logits: &[f32], max: f64) -> Vec<Candidate> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let mut candidates: Vec<_> = (0..)
            .zip(logits)
            .map(|(id, logit)| Candidate {
                id,
                weight: ((f64::from(*logit) - max) / temperature).exp(),
            })
            .collect();
        if let Some(k) = top_k.filter(|k| *k < candidates.len()) {
            candidates.select_nth_unstable_by(k - 1, likelier);
            candidates.truncate(k);
        }
        if let Some(p) = top_p.filter(|p| *p < 1.0) {
            keep_nucleus(&mut candidates, p);
        }
        if let Some(p) = min_p {
            // The likeliest token's weight is exp(0) = 1.
            candidates.retain(|c| c.weight >= p);
        }
        // The selection above leaves an order that depends on the library's version.
        candidates.sort_unstable_by_key(|c| c.id);
        candidates
    }
}

/// Keeps the likeliest tokens until their probabilities reach `p`.
fn keep_nucleus(candidates: &mut Vec<Candidate>, p: f64) {
    let total: f64 = candidates.iter().map(|c| c.weight).sum();
    // All tokens below this together have less than 1 - p, so none of them is needed, and the
    // sort need not see them.
    let negligible = total * (1.0 - p) / candidates.len() as f64;
    candidates.retain(|c| c.weight >= negligible);
    candidates.sort_unstable_by(likelier);
    let mut reached = 0.0;
    let last = candidates.iter().position(|c| {
        reached += c.weight;
        reached >= p * total
    });
    if let Some(last) = last {
        candidates.truncate(last + 1);
    }
}

/// Likelier tokens first, equal ones by id.
fn likelier(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

/// The lowest id of the greatest logit.
fn argmax(logits: &[f32]) -> Option<(u32, f32)> {
    (0..).zip(logits.iter().copied()).reduce(|best, next| if next.1 > best.1 { next } else { best })
}

#[cfg(test)]
mod tests;
