//! Budgets of layers by the variation of their attention, known once all are prefilled.

use burn::tensor::{DType, Tensor};
use kv_core::{Budget, CacheOptions, LayerCache, apportion, read_f32};

use super::{D2o, NAME};
use crate::{Observation, OwnedObservation, Policy, Result};

/// The least share of its prompt that a layer keeps, as in the authors' code.
const LEAST: f64 = 0.01;
/// The limit of a layer that is left whole.
const WHOLE: usize = i32::MAX as usize;

impl D2o {
    /// Compresses all layers, each sequence within budgets of its own.
    pub(super) fn prefill_together(
        &self,
        layers: &[OwnedObservation],
        new_tokens: usize,
        options: &CacheOptions,
    ) -> Result<Vec<LayerCache>> {
        let variations: Vec<Vec<f32>> =
            layers.iter().map(|layer| variation(&layer.view())).collect::<Result<_>>()?;
        let batch = variations.first().map_or(0, Vec::len);
        let tokens = layers.first().map_or(0, |layer| layer.view().tokens());
        let budgets: Vec<Vec<usize>> = (0..batch)
            .map(|row| {
                let own: Vec<f64> = variations.iter().map(|rows| f64::from(rows[row])).collect();
                self.layer_budgets(&own, tokens)
            })
            .collect();
        let compressed = layers.iter().enumerate().map(|(index, layer)| {
            let rows = budgets.iter().enumerate().map(|(row, budgets)| {
                let evictor = self.evictor.with_budget(Budget::Tokens(budgets[index]))?;
                let own = Self { evictor, options: self.options };
                own.prefill(&layer.row(row).view(), new_tokens, options.clone())
            });
            Ok(LayerCache::concat(rows.collect::<Result<_>>()?)?)
        });
        compressed.collect()
    }

    /// Slots per head of each layer, for prompts of `tokens`: in proportion to `softmax(−f)` of the
    /// variations `f`, together as many slots as under equal budgets.
    fn layer_budgets(&self, variations: &[f64], tokens: usize) -> Vec<usize> {
        let base = self.evictor.budget().unwrap_or(Budget::Ratio(1.0)).behind(tokens);
        let layers = variations.len();
        // Variations are below 1: nothing overflows.
        let weights: Vec<f64> = variations.iter().map(|f| (-f).exp()).collect();
        let sum: f64 = weights.iter().sum();
        if self.options.official {
            let ratio = |weight: &f64| {
                let share = layers as f64 * base as f64 / tokens as f64 * weight / sum;
                ((share.clamp(LEAST, 1.0) * tokens as f64) as usize).max(1)
            };
            let whole = |layer: usize| layer < 2 || layer + 1 == layers;
            let ratios = weights.iter().map(ratio).enumerate();
            return ratios.map(|(layer, own)| if whole(layer) { WHOLE } else { own }).collect();
        }
        // A budget beyond the prompt fills up while decoding.
        let most = if base < tokens { tokens } else { usize::MAX };
        let least = ((tokens as f64 * LEAST) as usize).max(1);
        apportion(&weights, layers * base, least, most)
    }
}

/// The variation of a layer's attention over tokens, one number a sequence, `[B]`: the mean over
/// query heads of the variance of the prompt's column sums, scaled to 0 to 1 in each head.
fn variation(observation: &Observation<'_>) -> Result<Vec<f32>> {
    let variation = observation.once("d2o", || {
        let sums = observation.attention_sums(NAME)?.cast(DType::F32);
        let (least, most) = (sums.clone().min_dim(2), sums.clone().max_dim(2));
        let range: Tensor<3> = (most - least.clone()).clamp_min(f32::MIN_POSITIVE);
        let normalised = (sums - least) / range;
        let mean = normalised.clone().mean_dim(2);
        let variance = (normalised - mean).powi_scalar(2).mean_dim(2);
        Ok(variance.mean_dim(1))
    })?;
    Ok(read_f32("variation", variation)?)
}
