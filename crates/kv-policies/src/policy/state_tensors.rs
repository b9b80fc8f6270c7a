//! Counts and positions that caches hold as f32 tensors.

use burn::tensor::{DType, Device, Tensor};
use kv_core::LayerCache;

use crate::{PolicyError, Result};

/// Tokens up to which f32 tells every count and position apart.
pub(crate) const EXACT: usize = 1 << 24;

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
