//! Arguments of the kernels of attention over slots and sketched tokens.

use cubecl::prelude::*;

use crate::attention::decode::kernel_args::HeadOutputs;
use crate::sketch::count_sketch::kernel_args::Sketch;

/// Head ranges, and how many cubes share each.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SplitRanges {
    /// First slots, `[B, Hkv]`.
    pub(super) offsets: Box<[i32]>,
    /// Live slots, `[B, Hkv]`.
    pub(super) lengths: Box<[i32]>,
    /// `B * Hkv`
    pub(super) total_kv_heads: usize,
    /// Cubes that share a range's slots and its sketched tokens.
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

/// Outputs of attention over slots and sketched tokens.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SketchOutputs<O: CubePrimitive, P: CubePrimitive> {
    pub(super) heads: HeadOutputs<O, P>,
    /// Logits of slots, `[S, G]`.
    pub(super) slot_logits: Box<[f32]>,
    /// Logits of sketched tokens, `[T, G]`.
    pub(super) token_logits: Box<[f32]>,
}
