use serde::{Deserialize, Serialize};

use crate::layer::expect_shape;
use crate::{Error, LayerCache, MemoryReport, Result};

/// Where a cache comes from, saved with it so that it is not continued with another model or
/// policy.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Origin {
    /// The model's name or fingerprint.
    pub model: String,
    /// The policy's configuration.
    pub policy: serde_json::Value,
}

/// The caches of all layers of one batch of sequences.
#[derive(Debug, Clone)]
pub struct KvCache {
    /// One a layer.
    pub layers: Vec<LayerCache>,
    /// Tokens that each sequence has seen, dropped ones included: the next token's position.
    pub seen: Vec<usize>,
    /// What made this cache.
    pub origin: Origin,
}

impl KvCache {
    /// Sequences in the batch.
    pub fn batch(&self) -> usize {
        self.seen.len()
    }

    /// The most slots that any head of any layer holds, per sequence.
    pub fn longest(&self) -> Vec<usize> {
        let rows = (0..self.batch()).map(|row| {
            let heads = self.layers.iter().flat_map(|layer| {
                let heads = layer.layout().kv_heads();
                layer.layout().lengths()[row * heads..(row + 1) * heads].iter()
            });
            heads.copied().max().unwrap_or_default()
        });
        rows.collect()
    }

    /// The host's part of a step that the device runs by itself: lengths change by `growth`, a list
    /// `[B * Hkv]` a layer, as the device's do.
    ///
    /// # Errors
    /// [`Error::CapacityExhausted`] where a head has no room, [`Error::Shape`]; nothing changes then.
    pub fn advance(&mut self, growth: &[Vec<isize>]) -> Result<()> {
        expect_shape("growth", &[growth.len()], &[self.layers.len()])?;
        let layers = self.layers.iter().zip(growth);
        let lengths = layers.map(|(layer, growth)| layer.advanced(growth));
        let lengths = lengths.collect::<Result<Vec<_>>>()?;
        for (layer, lengths) in self.layers.iter_mut().zip(lengths) {
            layer.layout.lengths_mut().copy_from_slice(&lengths);
        }
        Ok(())
    }

    /// Goes on as if every sequence had seen `tokens` more ([`LayerCache::assume`]).
    ///
    /// # Errors
    /// [`Error::CapacityExhausted`]; nothing changes then.
    pub fn assume(&mut self, tokens: usize) -> Result<()> {
        self.layers.iter().try_for_each(|layer| layer.check_assumed(tokens))?;
        self.layers.iter_mut().try_for_each(|layer| layer.assume(tokens))?;
        self.seen.iter_mut().for_each(|seen| *seen += tokens);
        Ok(())
    }

    /// Bytes over all layers.
    pub fn memory(&self) -> MemoryReport {
        self.layers.iter().map(LayerCache::memory).sum()
    }

    /// Checks that the cache was made by `origin`'s model and policy.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] that names both.
    pub fn expect_origin(&self, origin: &Origin) -> Result<()> {
        if self.origin == *origin {
            return Ok(());
        }
        Err(Error::InvalidPlan {
            what: "cache",
            reason: format!(
                "made by model {} with policy {}, continued with model {} and policy {}",
                self.origin.model, self.origin.policy, origin.model, origin.policy
            ),
        })
    }
}
