//! What the kernels take: scores of slots and of tokens, and a step's logits.

use cubecl::prelude::*;

use crate::components::pool::Pool;

/// The slots of all ranges with their scores.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ScoredSlots {
    /// Accumulated probabilities, `[S]`.
    pub(super) scores: Box<[f32]>,
    /// Positions of the slots' tokens, `[S]`.
    pub(super) positions: Box<[i32]>,
    /// First slots of ranges, `[B, Hkv]`.
    pub(super) offsets: Box<[i32]>,
    /// Live slots of ranges, `[B, Hkv]`.
    pub(super) lengths: Box<[i32]>,
}

/// The tokens that are held exactly.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ExactTokens<F: Float> {
    /// Rows in vectors of 4.
    pub(super) pool: Pool<Vector<F, Const<4>>, Vector<F, Const<4>>>,
    pub(super) slots: ScoredSlots,
}

/// The scores of all tokens, of which those in the sketch have one.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct TokenScores {
    /// Accumulated probabilities, `[T]`, negative for tokens that are not in the sketch.
    pub(super) scores: Box<[f32]>,
    /// The highest score of each part of a range's tokens, negated, `[B * Hkv, parts]`.
    pub(super) tops: Box<[f32]>,
    /// The token that has it, `[B * Hkv, parts]`.
    pub(super) tops_at: Box<[i32]>,
    /// Parts of a range's tokens.
    pub(super) parts: usize,
    /// Tokens of a part.
    pub(super) part: usize,
}

/// What a step's attention has left, and where sequences are.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct StepLogits {
    /// `[S, G]`, or `[T, G]` where they stand among the tokens'.
    pub(super) slots: Box<[f32]>,
    /// `[T, G]`
    pub(super) tokens: Box<[f32]>,
    /// `[B, Hkv, G]`
    pub(super) log_sum_exp: Box<[f32]>,
    /// Position of each sequence's newest token, `[B]`.
    pub(super) newest: Box<[i32]>,
    /// `Hkv`
    pub(super) kv_heads: usize,
    /// `B * Hkv`
    pub(super) total_kv_heads: usize,
}

/// What moves, and when.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Moves {
    /// Tokens that went into the sketch, and tokens that changed places, `[B * Hkv, 2]`.
    pub(super) moved: Box<[i32]>,
    /// Slots beyond a range's limit that it may hold before all of them go.
    pub(super) slack: i32,
    /// What a slot's score is multiplied by before a token's is compared with it.
    pub(super) replace_rate: f32,
}
