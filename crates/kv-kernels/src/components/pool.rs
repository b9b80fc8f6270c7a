//! Pools of slots and their head ranges as kernel arguments.

use cubecl::prelude::*;

/// The keys and values of a pool's slots.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Pool<K: CubePrimitive, V: CubePrimitive> {
    /// `[S, D]`, in the kernel's vectors or words.
    pub(crate) keys: Box<[K]>,
    /// `[S, D]`, in the kernel's vectors or words.
    pub(crate) values: Box<[V]>,
}

/// The head ranges of a call.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct HeadRanges {
    /// First slots, `[B, Hkv]`.
    pub(crate) offsets: Box<[i32]>,
    /// Live slots, `[B, Hkv]`.
    pub(crate) lengths: Box<[i32]>,
    /// `B * Hkv`
    pub(crate) total_kv_heads: usize,
}

/// The tensors of a pool: keys, values, positions and weights.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PoolSlots<R: CubePrimitive> {
    /// `[S, D]`, in the kernel's vectors.
    pub(crate) keys: Box<[R]>,
    /// `[S, D]`, in the kernel's vectors.
    pub(crate) values: Box<[R]>,
    /// Positions of the slots' tokens, `[S]`.
    pub(crate) positions: Box<[i32]>,
    /// Logarithms of weights, `[S]`, where slots are weighted.
    pub(crate) log_weights: Box<[f32]>,
}
