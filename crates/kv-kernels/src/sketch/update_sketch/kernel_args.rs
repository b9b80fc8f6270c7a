//! Arguments of the kernels of `update_sketch`: scores of slots and of tokens, and a step's logits.

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

/// The tokens that slots hold exactly.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ExactTokens<F: Float> {
    /// Keys and values, in vectors of 4.
    pub(super) pool: Pool<Vector<F, Const<4>>, Vector<F, Const<4>>>,
    pub(super) slots: ScoredSlots,
}

/// The scores of tokens in the sketch.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct TokenScores {
    /// Accumulated probabilities, `[T]`, negative for tokens that are not in the sketch.
    pub(super) scores: Box<[f32]>,
    /// The highest score of each part of a range's tokens, negated, `[B * Hkv, parts]`.
    pub(super) tops: Box<[f32]>,
    /// The token that has each part's highest score, `[B * Hkv, parts]`.
    pub(super) tops_at: Box<[i32]>,
    /// Parts of a range's tokens.
    pub(super) parts: usize,
    /// Tokens of a part.
    pub(super) part: usize,
}

/// A step's logits, and the positions of sequences.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct StepLogits {
    /// Logits of slots, `[S, G]`, or `[T, G]` where they lie among the tokens' logits.
    pub(super) slots: Box<[f32]>,
    /// Logits of tokens in the sketch, `[T, G]`.
    pub(super) tokens: Box<[f32]>,
    /// Log-sum-exps, `[B, Hkv, G]`.
    pub(super) log_sum_exp: Box<[f32]>,
    /// Position of each sequence's newest token, `[B]`.
    pub(super) newest: Box<[i32]>,
    /// `Hkv`
    pub(super) kv_heads: usize,
    /// `B * Hkv`
    pub(super) total_kv_heads: usize,
}

/// The moves of tokens so far, and their rules.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Moves {
    /// How many tokens went into the sketch, and how many changed places, `[B * Hkv, 2]`.
    pub(super) moved: Box<[i32]>,
    /// Slots that a range may hold beyond its limit before it evicts the surplus.
    pub(super) slack: i32,
    /// The factor of a slot's score before it is compared with a token's score.
    pub(super) replace_rate: f32,
}
