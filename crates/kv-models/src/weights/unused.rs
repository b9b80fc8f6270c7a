//! Tensors that no part of the model has asked for.

use std::collections::BTreeSet;

use super::Weights;
use crate::error::{WeightsError, listed};

/// Parts of the decoder: all their tensors take part in its computation.
const DECODER: [&str; 4] = ["model.layers.", "model.norm.", "model.embed_tokens.", "lm_head."];

/// Ends of names of stored tensors that follow from the configuration: frequencies of the rotary
/// embedding and attention masks.
const DERIVED: [&str; 6] = [
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "attn.bias",
    "attn.masked_bias",
    "causal_mask",
];

impl Weights {
    /// Refuses tensors of the decoder that have not been `used` to build it, and warns of others.
    ///
    /// # Errors
    /// [`WeightsError::MoreLayers`], [`WeightsError::NotAnnounced`].
    pub(crate) fn check_unused(
        &self,
        used: &BTreeSet<String>,
        layers: usize,
    ) -> Result<(), WeightsError> {
        let derived = |name: &str| DERIVED.iter().any(|end| name.ends_with(end));
        let unused = self.names().filter(|name| !used.contains(*name) && !derived(name));
        let (decoder, others): (Vec<String>, Vec<String>) = unused
            .map(str::to_string)
            .partition(|name| DECODER.iter().any(|part| name.starts_with(part)));
        let last = decoder.iter().filter_map(|name| layer_of(name)).max();
        if let Some(last) = last
            && last >= layers
        {
            return Err(WeightsError::MoreLayers { expected: layers, actual: last + 1 });
        }
        if !decoder.is_empty() {
            return Err(WeightsError::NotAnnounced { names: decoder });
        }
        if !others.is_empty() {
            tracing::warn!("tensors that no part of the model uses: {}", listed(&others));
        }
        Ok(())
    }
}

/// The layer that a tensor belongs to.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix(DECODER[0])?.split('.').next()?.parse().ok()
}
