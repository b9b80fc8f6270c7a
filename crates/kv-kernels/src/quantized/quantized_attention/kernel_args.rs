//! The arguments that the kernels of `quantized_attention` share.

use cubecl::prelude::*;

use crate::quantized::pool::QuantizedBits;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    pub(super) group: usize,
    pub(super) head_dim: usize,
    pub(super) bits: QuantizedBits,
    /// The most planes that a cube may have.
    pub(super) planes: usize,
    /// Numbers that shared memory has room for.
    pub(super) room: usize,
}

/// Ranges of quantised slots, and how many cubes share each.
#[derive(CubeType, CubeLaunch)]
pub(super) struct QuantizedRanges {
    /// First slots, `[B, Hkv]`.
    pub(super) offsets: Box<[i32]>,
    /// `[B, Hkv]`
    pub(super) lengths: Box<[i32]>,
    /// `B * Hkv`
    pub(super) total_kv_heads: usize,
    pub(super) splits: usize,
}

/// The parts' sums.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Parts {
    /// Weighted values, `[B * Hkv, splits, G, D]`.
    pub(super) values: Box<[f32]>,
    /// Maxima and sums of weights, `[B * Hkv, splits, G, 2]`.
    pub(super) stats: Box<[f32]>,
}
