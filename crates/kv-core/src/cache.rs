use serde::{Deserialize, Serialize};

use crate::layer::{LayoutTensors, expect_shape};
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

/// The host's lengths and counters of a cache ([`KvCache::mirror`]).
#[derive(Debug, Clone)]
pub struct Mirror(Vec<MirroredLayer>);

#[derive(Debug, Clone)]
struct MirroredLayer {
    /// `[B * Hkv]`
    lengths: Vec<usize>,
    /// Counters of policies' states.
    counters: Vec<usize>,
}

impl Mirror {
    /// By how much lengths grew since `before`, `[B * Hkv]` a layer.
    pub fn growth_since(&self, before: &Self) -> Vec<Vec<isize>> {
        let layers = self.0.iter().zip(&before.0).map(|(after, before)| {
            let heads = after.lengths.iter().zip(&before.lengths);
            heads.map(|(after, before)| *after as isize - *before as isize).collect()
        });
        layers.collect()
    }
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

    /// Puts a cache of one sequence into an idle row of arenas ([`LayerCache::place_row`]), with
    /// `room` free slots in every head.
    ///
    /// # Errors
    /// [`Error::ArenaFull`] and the other errors of [`LayerCache::place_row`]; the row is idle
    /// then.
    pub fn place_row(&mut self, row: usize, from: &Self, room: usize) -> Result<()> {
        expect_shape("layers", &[from.layers.len()], &[self.layers.len()])?;
        let mut tensors = LayoutTensors::default();
        for (layer, from) in self.layers.iter_mut().zip(&from.layers) {
            let lengths = from.layout().lengths().iter();
            let capacities: Vec<usize> = lengths.map(|length| length + room).collect();
            if let Err(error) = layer.place_row_by(row, from, &capacities, &mut tensors) {
                self.free_row(row)?;
                return Err(error);
            }
        }
        self.seen[row] = from.seen.first().copied().unwrap_or_default();
        Ok(())
    }

    /// Frees the row of a sequence in arenas, which is idle from then on.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn free_row(&mut self, row: usize) -> Result<()> {
        let mut tensors = LayoutTensors::default();
        self.layers.iter_mut().try_for_each(|layer| layer.free_row_by(row, &mut tensors))
    }

    /// Puts a cache of one sequence in the place of a row ([`LayerCache::replace_row`]).
    ///
    /// # Errors
    /// The errors of [`LayerCache::replace_row`]; the row holds no sequence then.
    pub fn replace_row(&mut self, row: usize, from: &Self) -> Result<()> {
        expect_shape("layers", &[from.layers.len()], &[self.layers.len()])?;
        let layers = self.layers.iter_mut().zip(&from.layers);
        let mut tensors = LayoutTensors::default();
        let mut replaced =
            layers.map(|(layer, from)| layer.replace_row_by(row, from, &mut tensors));
        replaced.try_for_each(|layer| layer)?;
        self.seen[row] = from.seen.first().copied().unwrap_or_default();
        Ok(())
    }

    /// Makes room for a step of idle rows of arenas. Call it before every step.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn rest_idle_rows(&mut self) -> Result<()> {
        let mut tensors = LayoutTensors::default();
        self.layers.iter_mut().try_for_each(|layer| layer.rest_idle_rows(&mut tensors))
    }

    /// Whether every head of a row has a free slot.
    pub fn has_room(&self, row: usize) -> bool {
        self.layers.iter().all(|layer| {
            let layout = layer.layout();
            let ranges = row * layout.kv_heads()..(row + 1) * layout.kv_heads();
            ranges.into_iter().all(|range| layout.lengths()[range] < layout.capacities()[range])
        })
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

    /// A copy of the host's lengths and counters. [`Self::restore`] puts it back after a step that
    /// was recorded and not run.
    pub fn mirror(&self) -> Mirror {
        let of_layer = |layer: &LayerCache| MirroredLayer {
            lengths: layer.layout.lengths().to_vec(),
            counters: layer.states.counters(),
        };
        Mirror(self.layers.iter().map(of_layer).collect())
    }

    /// Puts back the host's lengths and counters.
    pub fn restore(&mut self, mirror: &Mirror) {
        for (layer, known) in self.layers.iter_mut().zip(&mirror.0) {
            layer.layout.lengths_mut().copy_from_slice(&known.lengths);
            layer.states.set_counters(&known.counters);
        }
    }

    /// Updates the host's lengths after a step that the device runs by itself. Each length changes
    /// by `growth`, a list `[B * Hkv]` for each layer. A policy's state that changes lengths by
    /// itself gives the new lengths instead ([`crate::PolicyState::lengths_of_step`]).
    ///
    /// # Errors
    /// [`Error::CapacityExhausted`] where a head has no room, [`Error::Shape`]; nothing changes
    /// then.
    pub fn advance(&mut self, growth: &[Vec<isize>]) -> Result<()> {
        let lengths = self.advanced(growth)?;
        for (layer, lengths) in self.layers.iter_mut().zip(lengths) {
            layer.layout.lengths_mut().copy_from_slice(&lengths);
            layer.note_tokens(1);
        }
        Ok(())
    }

    /// Checks that heads have room for a step that changes lengths by `growth`.
    ///
    /// # Errors
    /// The errors of [`Self::advance`].
    pub fn check_advance(&mut self, growth: &[Vec<isize>]) -> Result<()> {
        self.advanced(growth).map(drop)
    }

    /// Lengths behind a step that changes them by `growth`.
    fn advanced(&mut self, growth: &[Vec<isize>]) -> Result<Vec<Vec<usize>>> {
        expect_shape("growth", &[growth.len()], &[self.layers.len()])?;
        let layers = self.layers.iter().zip(growth);
        let lengths = layers.map(|(layer, growth)| layer.advanced(growth));
        let lengths = lengths.collect::<Result<Vec<_>>>()?;
        // A recorded step reads and writes where its tensors are: they cannot grow.
        let mut states = self.layers.iter_mut().flat_map(|layer| layer.states.live_mut());
        states.try_for_each(|state| state.reserve(1, false))?;
        Ok(lengths)
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
