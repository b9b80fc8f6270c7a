//! Starting sessions: one pass over the prompts for any number of policies.

use std::sync::Arc;
use std::thread;

use burn::tensor::Tensor;
use kv_core::{CacheOptions, KvCache, LayerCache, MemoryReport};
use kv_policies::{LayerContext, Needs, Observed, Policy, Reuse};

use super::{Session, origin};
use crate::{Llama, Model, PrefillPass, Result};

/// Prefills all prompts once for all policies.
pub(super) fn prefill<'a>(
    model: &'a Model,
    policies: &[Arc<dyn Policy>],
    prompts: &[Vec<u32>],
    seeds: &[u64],
    new_tokens: usize,
) -> Result<Vec<Session<'a>>> {
    let llama: &Llama = model.llama();
    let needs = policies.iter().fold(Needs::default(), |needs, policy| needs.union(policy.needs()));
    let options = CacheOptions::new(&llama.device(), llama.dtype());
    let count = llama.config().num_layers;
    // Policy -> layer -> one cache a run of prompts.
    let mut parts: Vec<Vec<Vec<LayerCache>>> =
        policies.iter().map(|_| (0..count).map(|_| Vec::new()).collect()).collect();
    let by = match policies {
        [policy] if policy.changes_prefill() => Some(&**policy),
        _ => None,
    };
    let mut hidden = Vec::new();
    let mut longest = 0;
    let mut start = 0;
    while start < prompts.len() {
        let tokens = prompts[start].len();
        let run = prompts[start..].iter().take_while(|prompt| prompt.len() == tokens).count();
        let group: Vec<&[u32]> = prompts[start..start + run].iter().map(Vec::as_slice).collect();
        let own_seeds: Vec<u64> =
            (start..start + run).map(|row| seeds.get(row).copied().unwrap_or_default()).collect();
        let pass = PrefillPass { needs, by, seeds: &own_seeds, ..PrefillPass::default() };
        // Policy -> what those that compress all layers together have seen.
        let mut seen: Vec<Vec<Observed>> = policies.iter().map(|_| Vec::new()).collect();
        let prefilled = llama.prefill(&group, pass, &mut |observation| {
            let layer = observation.layer.index;
            for ((policy, parts), seen) in policies.iter().zip(&mut parts).zip(&mut seen) {
                if policy.defers() {
                    seen.push(Observed::new(observation, policy.needs()));
                    continue;
                }
                let cache = policy.prefill(observation, new_tokens, options.clone())?;
                parts[layer].push(cache);
            }
            match policies {
                [policy] => Ok(policy.prune(observation)?),
                _ => Ok(None),
            }
        })?;
        hidden.push(prefilled.last());
        for ((policy, parts), seen) in policies.iter().zip(&mut parts).zip(seen) {
            if policy.defers() {
                let caches = policy.prefill_layers(&seen, new_tokens, options.clone())?;
                parts.iter_mut().zip(caches).for_each(|(parts, cache)| parts.push(cache));
            }
        }
        longest = longest.max(run * tokens);
        start += run;
    }
    let logits = llama.logits(Tensor::cat(hidden, 0))?;
    policies
        .iter()
        .zip(parts)
        .map(|(policy, layers)| {
            let layers = layers.into_iter().map(LayerCache::concat);
            let mut cache = KvCache {
                layers: layers.collect::<std::result::Result<_, _>>()?,
                seen: prompts.iter().map(Vec::len).collect(),
                origin: origin(model, &**policy)?,
            };
            if policy.renumbers() {
                cache.seen = cache.longest();
            }
            let (policy, logits) = (policy.clone(), logits.clone());
            let config = llama.config();
            let (heads, dim) = (config.num_kv_heads, config.head_dim);
            // Layers whose keys and values were whole at a time.
            let reuses = || (0..count).any(|layer| reuses(&*policy, layer, count, prompts));
            let whole = match policy.defers() {
                true => count,
                false => 1 + usize::from(reuses()),
            };
            let scratch = MemoryReport::full(longest, whole, heads, dim, llama.dtype());
            let (home, ended) = (thread::current().id(), Vec::new());
            Ok(Session { model, policy, cache, logits, steps: 0, ended, home, scratch })
        })
        .collect()
}

/// Whether a layer takes keys and values of the layer below, which are held until then.
fn reuses(policy: &dyn Policy, index: usize, count: usize, prompts: &[Vec<u32>]) -> bool {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or_default();
    let frozen = policy.frozen_tokens(LayerContext { index, count }, longest);
    frozen.is_some_and(|frozen| frozen.reuse == Reuse::KeysValues)
}
