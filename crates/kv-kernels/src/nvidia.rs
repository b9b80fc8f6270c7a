//! Instructions of NVIDIA devices that CubeCL has no names for.

// What PTX writes looks unwritten to the compiler.
#![allow(unused_assignments)]

use cubecl::prelude::*;

/// `2^x`, as fast as the device can.
#[cube]
pub(crate) fn exp2(x: f32) -> f32 {
    let mut y = 0.0f32;
    gpu_asm!("ex2.approx.ftz.f32 {}, {};", out(_) y, in(_) x, options(pure, nomem));
    y
}

/// `log2 x`, likewise.
#[cube]
pub(crate) fn log2(x: f32) -> f32 {
    // An operation makes a value of what may be a variable.
    let x = x + 0.0f32;
    let mut y = 0.0f32;
    gpu_asm!("lg2.approx.ftz.f32 {}, {};", out(_) y, in(_) x, options(pure, nomem));
    y
}

/// The least of a whole plane's numbers, of compute capability 8.0 on.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn least_of_plane(x: u32) -> u32 {
    let x = x | 0u32;
    let mut y = 0u32;
    gpu_asm!("redux.sync.min.u32 {}, {}, 0xffffffff;", out(_) y, in(_) x);
    y
}
