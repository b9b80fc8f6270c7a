//! What the kernels take and write.

use cubecl::prelude::*;

use crate::attention::decode::kernel_args::HeadOutputs;
use crate::sketch::count_sketch::kernel_args::Sketch;

/// Head ranges, which cubes share.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SplitRanges {
    /// First slots, `[B, Hkv]`.
    pub(super) offsets: Box<[i32]>,
    /// Live slots, `[B, Hkv]`.
    pub(super) lengths: Box<[i32]>,
    /// `B * Hkv`
    pub(super) total_kv_heads: usize,
    /// Cubes that share a range's slots, and its tokens in the sketch.
    pub(super) splits: usize,
}

/// The tokens in a sketch.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SketchedTokens {
    pub(super) sketch: Sketch,
    /// Scores, `[T]`, negative for tokens that are not in the sketch.
    pub(super) scores: Box<[f32]>,
    /// Position of each sequence's newest token, `[B]`.
    pub(super) newest: Box<[i32]>,
    /// `Hkv`
    pub(super) kv_heads: usize,
}

/// What attention over slots and sketched tokens writes.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SketchOutputs<O: CubePrimitive, P: CubePrimitive> {
    pub(super) heads: HeadOutputs<O, P>,
    /// `[S, G]`
    pub(super) slot_logits: Box<[f32]>,
    /// `[T, G]`
    pub(super) token_logits: Box<[f32]>,
}
