//! Predicted scores: averages of the scores that queries gave each slot, unnormalised, as
//! logarithms.

use burn::tensor::{DType, Tensor};
use kv_core::LayerCache;
use kv_kernels::{AverageWeights, StepScores, average_scores};
use serde::{Deserialize, Serialize};

use super::{KeepKv, NAME, VOTES, VOTES_HIGH};
use crate::merging::merge_groups::Merged;
use crate::policy::attention_scores::window_logits;
use crate::policy::sentinels::LOG_OF_NO_SCORE;
use crate::{Attended, Observation, Result};

/// Track of `ln S`, a slot's weighted sum of scores.
pub(super) const LOG_SCORES: &str = "log-scores";
/// Track of the sum of the weights, as a logarithm: the average is `S` divided by it.
pub(super) const LOG_SAMPLES: &str = "log-samples";
/// How future scores are predicted from past ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Predictor {
    /// An exponential moving average (equation 8).
    #[default]
    Ema,
    /// The mean of all scores.
    Cumulative,
    /// The mean of the last `window` scores, as in the authors' code. Each slot keeps these scores,
    /// and merges wait for the device.
    Window,
}

/// A prompt's scores.
pub(super) struct PromptScores {
    /// `ln S`, `[B * Hkv, T]`.
    pub(super) scores: Tensor<2>,
    /// The logarithm of the weights' sum, `[B * Hkv, T]`.
    pub(super) samples: Tensor<2>,
}

impl KeepKv {
    /// Logarithms of the weights of a new score and of the average so far.
    fn weights(&self) -> [f64; 2] {
        match self.options.predictor {
            Predictor::Ema => [(1.0 - self.options.alpha).ln(), self.options.alpha.ln()],
            Predictor::Cumulative | Predictor::Window => [0.0, 0.0],
        }
    }

    /// The scores that the last queries of a prompt give its tokens.
    pub(super) fn prompt_scores(&self, observation: &Observation<'_>) -> Result<PromptScores> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        let total_kv_heads = batch * kv_heads;
        let window = observation.last_queries(NAME, self.options.window)?.dims()[2];
        let [new, old] = self.weights();
        let scores = observation.once(&format!("{NAME} {window} {new} {old}"), || {
            let rows = self.prompt_rows(observation)?;
            let ages = (0..window).rev().map(|age| (new + age as f64 * old) as f32);
            let ages = ages.collect::<Vec<_>>().repeat(rows.dims()[1] / window);
            let ages = Tensor::<1>::from_data(ages.as_slice(), (&rows.device(), DType::F32));
            let count = ages.dims()[0];
            let sums = log_mean(rows + ages.reshape([1, count, 1]), 1);
            Ok(sums.add_scalar((window as f64).ln()))
        })?;
        let seen = |age: usize| (0..age).map(|age| (new + age as f64 * old).exp()).sum::<f64>();
        let samples: Vec<f32> = (0..tokens)
            .map(|token| match self.options.absolute_step {
                true => (1.0 - self.options.alpha.powi(tokens as i32)).ln() as f32,
                false => seen(window.min(tokens - token)).ln() as f32,
            })
            .collect();
        let samples = Tensor::<1>::from_data(samples.as_slice(), (&scores.device(), DType::F32));
        Ok(PromptScores {
            scores: scores.reshape([total_kv_heads, tokens]),
            samples: samples.unsqueeze_dim::<2>(0).expand([total_kv_heads, tokens]),
        })
    }

    /// Logits of the last queries, `[B * Hkv, G * W, T]`.
    fn prompt_rows(&self, observation: &Observation<'_>) -> Result<Tensor<3>> {
        let queries = observation.last_queries(NAME, self.options.window)?;
        let [batch, kv_heads, tokens, _] = observation.dims();
        let [_, heads, window, _] = queries.dims();
        let logits = window_logits(&queries, observation.keys);
        Ok(logits.reshape([batch * kv_heads, heads / kv_heads * window, tokens]))
    }

    /// `ln s` of each of the last queries of a prompt, `[B * Hkv, W, T]`.
    pub(super) fn prompt_scores_of_each(&self, observation: &Observation<'_>) -> Result<Tensor<3>> {
        let rows = self.prompt_rows(observation)?;
        let window = observation.last_queries(NAME, self.options.window)?.dims()[2];
        let [total_kv_heads, count, tokens] = rows.dims();
        let rows = rows.reshape([total_kv_heads, count / window, window, tokens]);
        Ok(log_mean(rows, 1).squeeze_dim(1))
    }

    /// `ln(ŝ + ε)`
    pub(super) fn add_epsilon(&self, log_scores: Tensor<1>) -> Tensor<1> {
        if self.options.epsilon == 0.0 {
            return log_scores;
        }
        let epsilon = log_scores.full_like(self.options.epsilon.ln());
        log_add(log_scores, epsilon)
    }

    /// Adds a step's scores to the averages.
    pub(super) fn observe(&self, cache: &mut LayerCache, attended: &Attended<'_>) -> Result<()> {
        if self.options.predictor == Predictor::Window {
            return self.observe_window(cache, &attended.logits);
        }
        let StepScores { logits, weights } = self.step_scores(attended);
        let log_weights = cache.log_weights().cloned();
        Ok(cache.change_slots([LOG_SCORES, LOG_SAMPLES], |_, _, [scores, samples]| {
            Ok(average_scores(scores, samples, logits, log_weights, weights)?)
        })?)
    }

    /// The evictor's track that merged slots have the sum of.
    pub(super) fn inherited(&self) -> Option<&'static str> {
        self.evictor.accumulates().filter(|_| self.options.inherit)
    }

    /// Writes the weights of merged slots, their predicted scores as averages, and the evictor's
    /// scores that they inherit.
    pub(super) fn weigh(&self, cache: &mut LayerCache, merged: Merged) -> Result<()> {
        let (slots, weights) = (merged.slots(), merged.weights);
        let count = slots.dims()[0];
        let column = |at: usize| weights.clone().narrow(1, at, 1).reshape([count]);
        cache.write_log_weights(&slots, column(0))?;
        if let Some(samples) = cache.track(LOG_SAMPLES) {
            let own = samples.clone().select(0, slots.clone().clamp_min(0));
            let scores = column(1) + own;
            cache.write_track(LOG_SCORES, &slots, scores)?;
        }
        let tracks = [Some(VOTES), Some(VOTES_HIGH), self.inherited()];
        for (track, at) in tracks.into_iter().flatten().zip(2..) {
            if cache.track(track).is_some() {
                cache.write_track(track, &slots, column(at))?;
            }
        }
        Ok(())
    }

    /// The scores of a step, as averages take them.
    pub(super) fn step_scores(&self, attended: &Attended<'_>) -> StepScores {
        let [new, old] = self.weights().map(|weight| weight as f32);
        StepScores { logits: attended.logits.clone(), weights: AverageWeights { new, old } }
    }
}

/// `ln` of the mean of exponentials along a dimension, which stays.
pub(super) fn log_mean<const D: usize>(values: Tensor<D>, dim: usize) -> Tensor<D> {
    // Where all values are −∞, any finite maximum gives −∞.
    let top = values.clone().max_dim(dim).clamp_min(LOG_OF_NO_SCORE);
    (values - top.clone()).exp().mean_dim(dim).log() + top
}

/// `ln(exp(a) + exp(b))`
fn log_add(a: Tensor<1>, b: Tensor<1>) -> Tensor<1> {
    let top = a.clone().max_pair(b.clone());
    ((a - top.clone()).exp() + (b - top.clone()).exp()).log() + top
}

/// The mean of each group's queries, `[B, Hq, D]` to `[B * Hkv, D]`, f32.
pub(super) fn mean_queries(queries: Tensor<3>, kv_heads: usize) -> Tensor<2> {
    let [batch, heads, head_dim] = queries.dims();
    let grouped = queries.cast(DType::F32);
    let grouped = grouped.reshape([batch * kv_heads, heads / kv_heads, head_dim]);
    grouped.mean_dim(1).squeeze_dim(1)
}
