//! What the kernels of the choice take, and leave to each other.

use cubecl::prelude::*;

/// The keys that are scored, and by which queries.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ScoredKeys<F: Float, N: Size> {
    /// `[P, G, columns]`, in vectors of `N`.
    pub(super) query: Box<[Vector<F, N>]>,
    /// `[S, columns]`, in vectors of `N`.
    pub(super) keys: Box<[Vector<F, N>]>,
    /// What products of queries and keys are multiplied by.
    pub(super) scale: f32,
}

/// The ranges of a step.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct StepRanges {
    /// First slots, `[P]`.
    pub(super) offsets: Box<[i32]>,
    /// Live slots, `[P]`.
    pub(super) lengths: Box<[i32]>,
    /// Indices of the newest tokens, `[B]`.
    pub(super) newest: Box<[i32]>,
    /// Index sets, `[P, row]`, as [`table`](super::table) has them.
    pub(super) table: Box<[i32]>,
    /// `P`
    pub(super) total_kv_heads: usize,
    /// `Hkv`
    pub(super) kv_heads: usize,
    /// Steps of a block, within which sets are shared.
    pub(super) block: usize,
    /// The share of the tokens so far that is hidden, in units of 2⁻³².
    pub(super) hidden_share: u32,
}

/// The vectors by which steps are compared.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ComparedVectors<F: Float> {
    /// The step's, `[P, parts, length]`.
    pub(super) step: Box<[F]>,
    /// Those of the block's entries, `[P, sets, parts, length]`.
    pub(super) cached: Box<[f32]>,
}

/// The scores of slots.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Scores {
    /// `[P, G, stride]`, where scores are not ordered as they are made.
    pub(super) logits: Box<[f32]>,
    /// Sort keys, `[P, stride]`, where shared memory does not hold them.
    pub(super) ordered: Box<[u32]>,
    /// Slots that a range has room for.
    pub(super) stride: usize,
}

/// What a choice makes of scores.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Selection {
    /// Bits of the selected slots, of the best ones and of the set, `[P, 3, words]`, where shared
    /// memory does not hold them.
    pub(super) bitmasks: Box<[u32]>,
    /// Of each query over the visible slots, `[P, G]`, where it is measured.
    pub(super) log_sum_exp: Box<[f32]>,
    /// Neighbours on each side that the best bring along.
    pub(super) radius: usize,
}

/// What chooses for a step.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Choosing<F: Float, N: Size> {
    pub(super) keys: ScoredKeys<F, N>,
    pub(super) ranges: StepRanges,
    pub(super) vectors: ComparedVectors<F>,
    pub(super) scores: Scores,
    pub(super) selection: Selection,
}
