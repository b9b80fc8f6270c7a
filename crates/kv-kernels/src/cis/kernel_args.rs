//! Arguments of the kernels that choose a step's slots. `P` is `B * Hkv`, the head ranges.

use cubecl::prelude::*;

/// The keys that are scored, and the queries that score them.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ScoredKeys<F: Float, N: Size> {
    /// `[P, G, columns]`, in vectors of `N`.
    pub(super) query: Box<[Vector<F, N>]>,
    /// `[S, columns]`, in vectors of `N`.
    pub(super) keys: Box<[Vector<F, N>]>,
    /// The factor of `q · k`.
    pub(super) scale: f32,
}

/// The head ranges of a step, and their index sets.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct StepRanges {
    /// First slots, `[P]`.
    pub(super) offsets: Box<[i32]>,
    /// Live slots, `[P]`.
    pub(super) lengths: Box<[i32]>,
    /// Indices of the newest tokens, `[B]`.
    pub(super) newest: Box<[i32]>,
    /// Index sets, `[P, row]`, laid out as in [`table`](super::table).
    pub(super) table: Box<[i32]>,
    /// `P`
    pub(super) total_kv_heads: usize,
    /// `Hkv`
    pub(super) kv_heads: usize,
    /// Decode steps of a block, within which sets are shared.
    pub(super) block: usize,
    /// The share of the tokens so far that the step does not see, in units of 2⁻³².
    pub(super) hidden_share: u32,
}

/// The vectors by which steps are compared.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ComparedVectors<F: Float> {
    /// The step's vectors, `[P, parts, length]`.
    pub(super) step: Box<[F]>,
    /// The vectors of the block's entries, `[P, sets, parts, length]`.
    pub(super) cached: Box<[f32]>,
}

/// The scores of slots, for the kernels after the one that makes them.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Scores {
    /// Logits, `[P, G, stride]`, unless sort keys are made directly.
    pub(super) logits: Box<[f32]>,
    /// Sort keys, `[P, stride]`, unless shared memory holds them.
    pub(super) ordered: Box<[u32]>,
    /// Slots for which a range has room.
    pub(super) stride: usize,
}

/// Results of a selection.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Selection {
    /// Bitmasks of the selected slots, of the slots that are dilated, and of the set, `[P, 3,
    /// words]`, unless shared memory holds them.
    pub(super) bitmasks: Box<[u32]>,
    /// Log-sum-exp of each query over the visible slots, `[P, G]`, written where ranges are
    /// measured.
    pub(super) log_sum_exp: Box<[f32]>,
    /// The dilation radius: neighbours on each side that are added to the set.
    pub(super) radius: usize,
}

/// All arguments of a kernel in which one cube chooses for a range.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Choosing<F: Float, N: Size> {
    pub(super) keys: ScoredKeys<F, N>,
    pub(super) ranges: StepRanges,
    pub(super) vectors: ComparedVectors<F>,
    pub(super) scores: Scores,
    pub(super) selection: Selection,
}
