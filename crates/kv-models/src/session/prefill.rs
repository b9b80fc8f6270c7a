//! Starting sessions: one pass over the prompts for any number of policies, a layer at a time.

use std::ops::Range;
use std::sync::Arc;
use std::thread;

use burn::tensor::Tensor;
use kv_core::{CacheOptions, KvCache, LayerCache, MemoryReport};
use kv_kernels::device_work;
use kv_policies::{LayerContext, Needs, OwnedObservation, Policy, Reuse};

use super::{Session, origin};
use crate::llama::{PrefillRun, PrefixLayer, PromptGroup, PromptPrefix, SharedPrefix};
use crate::{Llama, Model, PrefillPass, Prefilled, Result};

/// Tokens whose activations are there at a time, unless one prompt has more; products are no faster
/// with more rows.
const AT_ONCE: usize = 32_768;

/// Prompts on their way through the layers, for any number of policies: a layer at a time, so that
/// other work may come in between.
///
/// Every layer is compressed as soon as it is complete, so that one layer's keys and values are
/// whole at a time, or all layers' under policies that compress them together.
#[derive(Debug)]
pub struct Prefilling<'a> {
    model: &'a Model,
    policies: Vec<Arc<dyn Policy>>,
    prompts: Vec<Vec<u32>>,
    /// The most new tokens of a prompt, one number a policy.
    reserved: Vec<usize>,
    /// Prompts that go through a layer together.
    groups: Vec<Range<usize>>,
    run: PrefillRun,
    /// Policy -> layer -> one cache a group of prompts.
    parts: Vec<Vec<Vec<LayerCache>>>,
    /// Policy -> group -> observations, for policies that compress all layers together.
    seen: Vec<Vec<Vec<OwnedObservation>>>,
    /// Keys and values of all layers so far, where they are kept for prompts that begin alike.
    whole: Option<Vec<PrefixLayer>>,
}

impl<'a> Prefilling<'a> {
    /// Checked prompts before the first layer. Policies that change the prompt's computation come
    /// alone.
    pub(super) fn new(
        model: &'a Model,
        policies: &[Arc<dyn Policy>],
        prompts: &[Vec<u32>],
        seeds: &[u64],
        new_tokens: &[usize],
        prefix: Option<&SharedPrefix>,
    ) -> Result<Self> {
        let _work = device_work();
        let llama = model.llama();
        let positions = llama.config().max_positions;
        let reserved: Vec<usize> = policies
            .iter()
            .map(|policy| new_token_capacity(&**policy, prompts, new_tokens, positions))
            .collect();
        let count = llama.config().num_layers;
        let mut seeds = seeds.to_vec();
        seeds.resize(prompts.len(), 0);
        let groups = groups(prompts);
        let all: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        let of = |rows: &Range<usize>| PromptGroup {
            prompts: &all[rows.clone()],
            seeds: &seeds[rows.clone()],
            prefix,
        };
        let run = PrefillRun::new(llama, &groups.iter().map(of).collect::<Vec<_>>())?;
        let policies = policies.to_vec();
        Ok(Self {
            model,
            prompts: prompts.to_vec(),
            reserved,
            run,
            parts: policies.iter().map(|_| (0..count).map(|_| Vec::new()).collect()).collect(),
            seen: policies.iter().map(|_| groups.iter().map(|_| Vec::new()).collect()).collect(),
            groups,
            policies,
            whole: None,
        })
    }

    /// Keeps whole keys and values of the one prompt, for [`Self::take_prefix`].
    pub(crate) fn keep_whole(mut self) -> Self {
        self.whole = Some(Vec::new());
        self
    }

    /// The whole keys and values of the one prompt, once all layers are computed.
    pub(crate) fn take_prefix(&mut self) -> Option<PromptPrefix> {
        let layers = self.whole.take()?;
        let complete = layers.len() == self.model.config().num_layers;
        let tokens = self.prompts.first()?.clone();
        complete.then_some(PromptPrefix { tokens, layers })
    }

    /// Goes through the next layer and compresses it; returns whether layers are left.
    ///
    /// # Errors
    /// The errors of [`Session::start`].
    pub fn layer(&mut self) -> Result<bool> {
        let _work = device_work();
        let Self { model, policies, reserved, groups, run, parts, seen, whole, .. } = self;
        let llama = model.llama();
        let needs = needs_of(policies);
        let by = match &policies[..] {
            [policy] if policy.capabilities().changes_prefill => Some(&**policy),
            _ => None,
        };
        let pass = PrefillPass { needs, by, ..PrefillPass::default() };
        let options = CacheOptions::new(&llama.device(), llama.dtype());
        run.layer(llama, &pass, &mut |group, observation| {
            let layer = observation.layer.index;
            if let Some(whole) = whole {
                whole.push(PrefixLayer {
                    keys: observation.keys.clone(),
                    values: observation.values.clone(),
                    column_sums: observation.column_sums.clone(),
                });
            }
            let each = policies.iter().zip(reserved.iter());
            for (((policy, new_tokens), parts), seen) in
                each.zip(parts.iter_mut()).zip(seen.iter_mut())
            {
                if policy.capabilities().needs_all_layers {
                    seen[group].push(OwnedObservation::new(observation, policy.needs()));
                    continue;
                }
                let parts = &mut parts[layer];
                parts.push(policy.prefill(observation, *new_tokens, options.clone())?);
                if parts.len() == groups.len() {
                    // Joined at once, so that the next layer's parts reuse this memory.
                    *parts = vec![LayerCache::concat(std::mem::take(parts))?];
                }
            }
            match &policies[..] {
                [policy] => Ok(policy.prune(observation)?),
                _ => Ok(None),
            }
        })
    }

    /// The sessions behind the last layer, one a policy.
    ///
    /// # Errors
    /// The errors of [`Session::start`].
    pub fn finish(self) -> Result<Vec<Session<'a>>> {
        let _work = device_work();
        let Self { model, policies, prompts, reserved, groups, run, mut parts, seen, .. } = self;
        let llama: &Llama = model.llama();
        let config = llama.config();
        let count = config.num_layers;
        let options = CacheOptions::new(&llama.device(), llama.dtype());
        let pass = PrefillPass { needs: needs_of(&policies), ..PrefillPass::default() };
        let prefilled = run.finish(llama, &pass)?;
        for (((policy, new_tokens), parts), seen) in
            policies.iter().zip(&reserved).zip(&mut parts).zip(seen)
        {
            for seen in seen.into_iter().filter(|_| policy.capabilities().needs_all_layers) {
                let caches = policy.prefill_layers(&seen, *new_tokens, options.clone())?;
                parts.iter_mut().zip(caches).for_each(|(parts, cache)| parts.push(cache));
            }
        }
        let hidden: Vec<_> = prefilled.iter().map(Prefilled::last).collect();
        let tokens = |rows: &Range<usize>| prompts[rows.clone()].iter().map(Vec::len).sum();
        let longest: usize = groups.iter().map(tokens).max().unwrap_or_default();
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
                if policy.capabilities().renumbers {
                    cache.seen = cache.longest();
                }
                let (policy, logits) = (policy.clone(), logits.clone());
                let (heads, dim) = (config.num_kv_heads, config.head_dim);
                // Layers whose keys and values were whole at a time.
                let reuses = || (0..count).any(|layer| reuses(&*policy, layer, count, &prompts));
                let whole = match policy.capabilities().needs_all_layers {
                    true => count,
                    false => 1 + usize::from(reuses()),
                };
                let scratch = MemoryReport::full(longest, whole, heads, dim, llama.dtype());
                let (home, ended) = (thread::current().id(), Vec::new());
                let (history, steps) = (Some(prompts.clone()), 0);
                Ok(Session { model, policy, cache, history, logits, steps, ended, home, scratch })
            })
            .collect()
    }
}

/// What all policies together must be shown.
fn needs_of(policies: &[Arc<dyn Policy>]) -> Needs {
    policies.iter().fold(Needs::default(), |needs, policy| needs.union(policy.needs()))
}

/// The most new tokens of a prompt: no more than the model has positions for.
fn new_token_capacity(
    policy: &dyn Policy,
    prompts: &[Vec<u32>],
    new_tokens: &[usize],
    positions: usize,
) -> usize {
    let left = |prompt: &Vec<u32>| match policy.capabilities().renumbers {
        // The policy decides how many positions the kept tokens take.
        true => positions,
        false => positions.saturating_sub(prompt.len()),
    };
    let reserved = prompts.iter().zip(new_tokens).map(|(prompt, new)| left(prompt).min(*new));
    reserved.max().unwrap_or_default()
}

/// Neighbouring prompts of equal length that go through a layer together: as many as have
/// [`AT_ONCE`] tokens, or one.
fn groups(prompts: &[Vec<u32>]) -> Vec<Range<usize>> {
    let mut groups = Vec::new();
    let mut start = 0;
    while start < prompts.len() {
        let tokens = prompts[start].len();
        let most = (AT_ONCE / tokens.max(1)).max(1);
        let equal = prompts[start..].iter().take(most).take_while(|prompt| prompt.len() == tokens);
        let end = start + equal.count();
        groups.push(start..end);
        start = end;
    }
    groups
}

/// Whether a layer takes keys and values of the layer below, which are held until then.
fn reuses(policy: &dyn Policy, index: usize, count: usize, prompts: &[Vec<u32>]) -> bool {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or_default();
    let frozen = policy.frozen_tokens(LayerContext { index, count }, longest);
    frozen.is_some_and(|frozen| frozen.reuse == Reuse::KeysValues)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_neighbours_of_equal_length_and_bounded() {
        let of = |lengths: &[usize]| {
            groups(&lengths.iter().map(|&length| vec![0; length]).collect::<Vec<_>>())
        };
        assert_eq!(of(&[3, 3, 5, 3]), [0..2, 2..3, 3..4]);
        assert_eq!(of(&[AT_ONCE / 2; 5]), [0..2, 2..4, 4..5]);
        assert_eq!(of(&[AT_ONCE + 1; 2]), [0..1, 1..2]);
    }
}
