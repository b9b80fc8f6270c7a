//! What policies that keep the whole cache and read a part of it have in common.

use burn::tensor::{DType, Device, Tensor};
use kv_core::{Budget, DecodeAttentionOptions, LayerCache};

use crate::{Observation, PolicyError, Result};

/// State of what each head may read, `[B, H, 3]`: tokens to choose, sinks, recents.
pub(crate) const BUDGETS: &str = "budgets";

/// Tokens that a budget has for a prompt; those of a whole number are the same behind any prompt.
pub(crate) fn tokens_of(budget: Budget, observation: &Observation<'_>) -> usize {
    match budget {
        Budget::Tokens(count) => count,
        Budget::Ratio(_) => budget.resolve(observation.tokens()),
    }
}

/// The most tokens that a budget has for any sequence of a cache.
pub(crate) fn most_tokens(budget: Budget, cache: &LayerCache) -> usize {
    let longest = cache.layout().capacities().iter().max().copied().unwrap_or_default();
    match budget {
        Budget::Tokens(count) => count.min(longest),
        Budget::Ratio(_) => budget.resolve(longest),
    }
}

/// Tokens up to which f32 tells every count and position apart.
const EXACT: usize = 1 << 24;

/// Checks that a prompt's tokens can be counted in f32, as tracks and states do.
///
/// # Errors
/// [`PolicyError::InvalidConfig`] beyond 2^24 tokens.
pub(crate) fn check_countable(policy: &'static str, tokens: usize) -> Result<()> {
    if tokens <= EXACT {
        return Ok(());
    }
    let reason = format!("a prompt of {tokens} tokens, expected at most {EXACT}: f32 counts them");
    Err(PolicyError::InvalidConfig { policy: policy.into(), reason })
}

/// Budgets of equal heads, as the state [`BUDGETS`] has them.
pub(crate) fn set_budgets(cache: &mut LayerCache, heads: usize, budget: [usize; 3]) {
    let batch = cache.layout().batch();
    // A budget beyond what f32 counts is one beyond any prompt.
    let row = budget.map(|count| count.min(EXACT) as f32);
    let rows = row.repeat(batch * heads);
    let state = numbers(&rows, [batch, heads, row.len()], &cache.options().device);
    cache.set_state(BUDGETS, state);
}

/// f32 numbers on a device, in rows without padding.
pub(crate) fn numbers(values: &[f32], shape: [usize; 3], device: &Device) -> Tensor<3> {
    Tensor::<1>::from_data(values, (device, DType::F32)).reshape(shape)
}

/// A state that priming has left.
pub(crate) fn state(
    policy: &'static str,
    cache: &LayerCache,
    name: &'static str,
) -> Result<Tensor<3>> {
    let missing = PolicyError::MissingObservation { policy, what: name };
    cache.state(name).cloned().ok_or(missing)
}

/// A step that attends to everything.
pub(crate) fn dense(cache: &LayerCache, query: Tensor<3>) -> Result<Tensor<3>> {
    Ok(cache.attend(query, DecodeAttentionOptions::default())?.output)
}
