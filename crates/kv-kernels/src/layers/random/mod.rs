//! Counter-based random numbers. A number depends on its seed and its place alone, so that every
//! backend draws equal numbers, in any order.

mod backend;
#[cfg(feature = "gpu")]
pub(crate) mod kernel;
#[cfg(feature = "gpu")]
mod launch;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::KernelError;
use crate::backend::check::Check;
use backend::RandomOps;

/// Numbers in `[0, 1)` of 24 bits, one for each pair of seed and draw: [`uniform`] on the device.
///
/// # Shapes
/// `seeds` `[N, 2]` and `draws` `[N]`, 32-bit; returns `[N]`, f32.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn uniforms(seeds: Tensor<2, Int>, draws: Tensor<1, Int>) -> Result<Tensor<1>, KernelError> {
    let check = Check::new("uniforms", &draws);
    check.supported()?;
    check.filled("draws", &draws)?;
    check.int("draws", &draws)?;
    check.shape("seeds", &seeds, &[draws.dims()[0], 2])?;
    check.int("seeds", &seeds)?;
    let numbers = <Dispatch as RandomOps>::uniforms(seeds.into_dispatch(), draws.into_dispatch());
    Ok(Tensor::from_dispatch(numbers))
}

/// A number in `[0, 1)` of 24 bits, which depends on seed and draw alone.
pub fn uniform([low, high]: [u32; 2], draw: u32) -> f32 {
    let bits = mix(mix(mix(low) ^ high) ^ draw);
    (bits >> 8) as f32 / 16_777_216.0
}

/// Mixes bits: every bit of the result depends on every bit of `x`. The constants are Wellons'
/// "lowbias32".
pub(crate) fn mix(x: u32) -> u32 {
    let mut x = x.wrapping_add(0x9e37_79b9);
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}
