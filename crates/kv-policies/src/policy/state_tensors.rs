//! State tensors of policies, and the counts that tracks hold as f32.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::LayerCache;

use super::config::invalid;
use crate::{PolicyError, Result};

/// Tokens up to which f32 tells every count and position apart.
pub(crate) const EXACT: usize = 1 << 24;

/// Checks that a prompt's tokens can be counted in f32, as tracks do.
///
/// # Errors
/// [`PolicyError::InvalidConfig`] beyond 2^24 tokens.
pub(crate) fn check_countable(policy: &'static str, tokens: usize) -> Result<()> {
    if tokens <= EXACT {
        return Ok(());
    }
    let reason = format!("a prompt of {tokens} tokens, expected at most {EXACT}: f32 counts them");
    Err(invalid(policy, reason))
}

/// Integers of a state on a device, in rows without padding; what exceeds i32 is its maximum.
pub(crate) fn int_numbers(
    values: impl IntoIterator<Item = usize>,
    shape: [usize; 3],
    device: &Device,
) -> Tensor<3, Int> {
    let values = values.into_iter().map(|value| i32::try_from(value).unwrap_or(i32::MAX));
    let values: Vec<i32> = values.collect();
    Tensor::<1, Int>::from_data(values.as_slice(), (device, DType::I32)).reshape(shape)
}

/// A state of real numbers, which was set when the cache was filled.
pub(crate) fn state(
    policy: &'static str,
    cache: &LayerCache,
    name: &'static str,
) -> Result<Tensor<3>> {
    let missing = PolicyError::MissingObservation { policy, what: name };
    cache.state(name).cloned().ok_or(missing)
}

/// A state of integers, which was set when the cache was filled.
pub(crate) fn int_state(
    policy: &'static str,
    cache: &LayerCache,
    name: &'static str,
) -> Result<Tensor<3, Int>> {
    let missing = PolicyError::MissingObservation { policy, what: name };
    cache.int_state(name).cloned().ok_or(missing)
}
