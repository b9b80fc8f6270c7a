//! A prompt's choice of channels and of the sources of lists.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{CacheOptions, LayerCache};
use kv_kernels::{LIST_HEADER, NO_LIST};

use super::critical::Critical;
use super::shared::SharedLists;
use super::{HShare, NAME, PROMPT, SOURCES, copies, share_map};
use crate::policy::state_tensors::int_numbers;
use crate::reading::channels::{CHANNELS, ChannelsOf, channels};
use crate::reading::subset::set_budgets;
use crate::{Observation, OwnedObservation, Policy, Result};

/// A layer's channels and sources of lists, chosen by the prompt.
pub(super) struct Shares {
    /// `[B, Hq, r]`
    channels: Tensor<3, Int>,
    critical: Critical,
    /// The head whose list each query head takes, `[B]` of `Hq`.
    pub(super) heads: Vec<Vec<usize>>,
}

impl HShare {
    /// Chooses a layer's channels and sources of lists by its prompt.
    pub(super) fn shares(&self, observation: &Observation<'_>) -> Result<Shares> {
        let head_dim = observation.dims()[3];
        let labels = self.labels.unwrap_or((head_dim / 4).clamp(1, 32));
        let (own, of) = (self.channels.as_ref(), ChannelsOf::QueryHeads);
        let channels = channels(NAME, own, observation, of, labels, self.window)?;
        let heavy = self.parts(self.budget.behind(observation.tokens()))?.top;
        let queries = observation.last_queries(NAME, self.window)?;
        let critical = Critical::of(&queries, observation.keys, &channels, heavy)?;
        let [batch, heads, _] = channels.dims();
        let maps = (0..batch).map(|row| {
            let overlap = |a: usize, b: usize| critical.heads_share(row, a, b);
            share_map(heads, copies(heads, self.heads), overlap)
        });
        let heads = maps.collect();
        Ok(Shares { channels, critical, heads })
    }

    /// Sets a cache's states for decode steps; `layers` has the layer that each sequence reads
    /// from.
    pub(super) fn install(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        shares: &Shares,
        heads: &[Vec<usize>],
        layers: Option<&[usize]>,
    ) -> Result<()> {
        let parts = self.parts(self.budget.behind(observation.tokens()))?;
        let [batch, count, _] = shares.channels.dims();
        let sources = heads.iter().enumerate().flat_map(|(row, heads)| {
            let layer = layers.map(|layers| layers[row]);
            heads.iter().flat_map(move |&head| [Some(head), layer]).flatten()
        });
        let device = cache.options().device.clone();
        let columns = 1 + usize::from(layers.is_some());
        cache.set_int_state(SOURCES, int_numbers(sources, [batch, count, columns], &device));
        let lengths = cache.layout().lengths().chunks(cache.layout().head_ranges() / batch);
        let prompts = int_numbers(lengths.map(|lengths| lengths[0]), [batch, 1, 1], &device);
        cache.set_int_state(PROMPT, prompts);
        set_budgets(cache, count, [parts.top, parts.sinks, parts.recents]);
        cache.set_int_state(CHANNELS, shares.channels.clone());
        let width = LIST_HEADER + parts.top.min(cache.layout().most_capacity().max(1));
        let mut list = vec![0; width];
        // Nothing is chosen yet: the first step does.
        list[0] = NO_LIST;
        let lists = list.repeat(batch * count);
        let lists = Tensor::<1, Int>::from_data(lists.as_slice(), (&device, DType::I32));
        let lists = lists.reshape([batch, count, width]);
        cache.insert_policy_state(SharedLists(lists));
        Ok(())
    }

    /// The layer whose lists each layer behind the dense ones reads, `[B]` of these layers.
    fn layer_maps(&self, shares: &[Shares]) -> Vec<Vec<usize>> {
        let batch = shares.first().map_or(0, |shares| shares.heads.len());
        let count = shares.len();
        let maps = (0..batch).map(|row| {
            let overlap =
                |a: usize, b: usize| shares[a].critical.layers_share(&shares[b].critical, row);
            share_map(count, copies(count, self.layers), overlap)
        });
        maps.collect()
    }

    /// Compresses all layers together, since a layer may take another layer's lists.
    pub(super) fn prefill_together(
        &self,
        layers: &[OwnedObservation],
        new_tokens: usize,
        options: &CacheOptions,
    ) -> Result<Vec<LayerCache>> {
        let sharing = layers.iter().skip(self.dense_layers);
        let shares: Vec<Shares> =
            sharing.map(|layer| self.shares(&layer.view())).collect::<Result<_>>()?;
        let maps = self.layer_maps(&shares);
        let caches = layers.iter().enumerate().map(|(index, layer)| {
            let observation = layer.view();
            let selection = self.select(&observation)?.selection;
            let room = self.room(&observation, new_tokens)?;
            let mut cache = observation.cache(&selection, room, options.clone())?;
            if let Some(own) = index.checked_sub(self.dense_layers) {
                let sources: Vec<usize> = maps.iter().map(|map| map[own]).collect();
                // A layer that takes another's lists takes the lists of that layer's choosing
                // heads.
                let rows = sources.iter().enumerate();
                let heads: Vec<_> = rows.map(|(row, &of)| shares[of].heads[row].clone()).collect();
                self.install(&mut cache, &observation, &shares[own], &heads, Some(&sources))?;
            }
            Ok(cache)
        });
        caches.collect()
    }
}
