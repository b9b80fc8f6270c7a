//! The kernels that split projections into heads and write new tokens. A unit holds elements `i`
//! and `i + D / 2` of a head, which RoPE rotates together.

use cubecl::prelude::*;

use super::PlacementKind;
use crate::attention::evicting::LOWEST_NORM;
use crate::components::pool::PoolSlots;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    pub(crate) query_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Whether queries and keys are rotated.
    pub(crate) rotates: bool,
    /// Whether queries and keys are normalised.
    pub(crate) normalises: bool,
    /// Units of a cube.
    pub(crate) units: usize,
}

impl Blueprint {
    /// Heads that a cube takes at a time.
    pub(crate) fn rows(self) -> usize {
        self.units / (self.head_dim / 2)
    }
}

/// Projections of tokens, and the norms and rotations of their queries and keys.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ProjectedTokens<E: Float> {
    /// `[B * T, (Hq + 2 Hkv) D]`
    projected: Box<[E]>,
    /// `[B * T]`
    positions: Box<[i32]>,
    /// `[positions, D / 2]`, where queries and keys are rotated.
    cos: Box<[f32]>,
    /// `[positions, D / 2]`, where queries and keys are rotated.
    sin: Box<[f32]>,
    /// `[D]`, where queries and keys are normalised.
    query_norm: Box<[E]>,
    /// `[D]`, where queries and keys are normalised.
    key_norm: Box<[E]>,
    /// The number that is added to mean squares.
    epsilon: f32,
}

/// Elements `i` and `i + D / 2` of a token's head, which rotate together.
#[derive(CubeType, Clone, Copy)]
struct RotatedPair {
    token: usize,
    /// The head, counted over queries, then keys, then values.
    head: usize,
    position: usize,
    i: usize,
    /// Whether the pair exists.
    live: bool,
}

/// A pair of a head's elements after norm and RoPE. All units of a cube must call this function,
/// even those whose pair does not exist.
#[cube]
fn head_pair<E: Float>(
    tokens: &ProjectedTokens<E>,
    own: &RotatedPair,
    squares: &mut Shared<[f32]>,
    #[comptime] blueprint: Blueprint,
) -> Vector<f32, Const<2>> {
    let (token, head, position) = (own.token, own.head, own.position);
    let (i, live) = (own.i, own.live);
    let half = comptime!(blueprint.head_dim / 2);
    let queries = blueprint.query_heads.comptime();
    let keys_end = comptime!(blueprint.query_heads + blueprint.kv_heads);
    let heads = comptime!(blueprint.query_heads + 2 * blueprint.kv_heads);
    let mut first = 0.0f32;
    let mut second = 0.0f32;
    if live {
        let at = (token * heads + head) * blueprint.head_dim.comptime() + i;
        first = f32::cast_from(tokens.projected[at]);
        second = f32::cast_from(tokens.projected[at + half]);
    }
    if comptime!(blueprint.normalises) {
        let unit = UNIT_POS as usize;
        squares[unit] = first * first + second * second;
        sync_cube();
        if live && head < keys_end {
            let mut sum = 0.0f32;
            let start = unit - i;
            for other in 0..half {
                sum += squares[start + other];
            }
            let mean = sum / comptime!(blueprint.head_dim as f32);
            let root = (mean + tokens.epsilon).sqrt();
            let mut weights = Vector::<f32, Const<2>>::new(0.0f32);
            if head < queries {
                weights.insert(0usize, f32::cast_from(tokens.query_norm[i]));
                weights.insert(1usize, f32::cast_from(tokens.query_norm[i + half]));
            } else {
                weights.insert(0usize, f32::cast_from(tokens.key_norm[i]));
                weights.insert(1usize, f32::cast_from(tokens.key_norm[i + half]));
            }
            // Rounded to the dtype before and after the multiplication by the weight, as in the
            // models' own code.
            first = round::<E>(round::<E>(first / root) * weights.extract(0usize));
            second = round::<E>(round::<E>(second / root) * weights.extract(1usize));
        }
        sync_cube();
    }
    let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
    pair.insert(0usize, first);
    pair.insert(1usize, second);
    if comptime!(blueprint.rotates) && live && head < keys_end {
        let c = tokens.cos[position * half + i];
        let s = tokens.sin[position * half + i];
        pair.insert(0usize, first * c - second * s);
        pair.insert(1usize, second * c + first * s);
    }
    pair
}

#[cube]
fn round<E: Float>(x: f32) -> f32 {
    f32::cast_from(E::cast_from(x))
}

/// Heads of all tokens.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct TokenHeads<E: Float> {
    /// `[B, Hq, T, D]`
    query: Box<[E]>,
    /// `[B, Hkv, T, D]`
    key: Box<[E]>,
    /// `[B, Hkv, T, D]`
    value: Box<[E]>,
    /// `B * T`
    all: usize,
    /// `T`
    tokens: usize,
}

/// Splits projections into heads.
#[cube(launch_unchecked)]
pub(crate) fn split_kernel<E: Float>(
    projected: &ProjectedTokens<E>,
    split: &mut TokenHeads<E>,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    let half = comptime!(blueprint.head_dim / 2);
    let rows = comptime!(blueprint.rows());
    let queries = blueprint.query_heads.comptime();
    let kv_heads = blueprint.kv_heads.comptime();
    let heads = comptime!(blueprint.query_heads + 2 * blueprint.kv_heads);
    let mut squares = Shared::<[f32]>::new_slice(comptime!(blueprint.units));
    let unit = UNIT_POS as usize;
    let i = unit % half;
    let row = CUBE_POS * rows + unit / half;
    let live = unit < rows * half && row < split.all * heads;
    let token = row / heads;
    let head = row % heads;
    let mut position = 0usize;
    if live {
        position = projected.positions[token] as usize;
    }
    let own = RotatedPair { token, head, position, i, live };
    let pair = head_pair::<E>(projected, &own, &mut squares, blueprint);
    if live {
        let tokens = split.tokens;
        let (sequence, at) = (token / tokens, token % tokens);
        let first = E::cast_from(pair.extract(0usize));
        let second = E::cast_from(pair.extract(1usize));
        let dim = blueprint.head_dim.comptime();
        if head < queries {
            let to = ((sequence * queries + head) * tokens + at) * dim + i;
            split.query[to] = first;
            split.query[to + half] = second;
        } else if head < queries + kv_heads {
            let to = ((sequence * kv_heads + head - queries) * tokens + at) * dim + i;
            split.key[to] = first;
            split.key[to + half] = second;
        } else {
            let to = ((sequence * kv_heads + head - queries - kv_heads) * tokens + at) * dim + i;
            split.value[to] = first;
            split.value[to + half] = second;
        }
    }
}

/// The slots of new tokens.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct NewSlots {
    /// First slots of ranges, `[B, Hkv]`.
    offsets: Box<[i32]>,
    /// Live slots, `[B, Hkv]`; one more where ranges grow.
    lengths: Box<[i32]>,
    /// Places in the ranges, `[B, Hkv]`, where they are given.
    next: Box<[i32]>,
    /// `B * Hkv`
    total_kv_heads: usize,
}

/// Results besides the written slots.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct NewTokens<E: Float> {
    /// `[B, Hq, D]`
    query: Box<[E]>,
    /// Logarithms of the value norms, `[S]`, written where places are given.
    log_norms: Box<[f32]>,
}

/// Comptime configuration of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct WriteBlueprint {
    pub(crate) heads: Blueprint,
    pub(crate) place: PlacementKind,
    /// Whether slots have weights.
    pub(crate) weighted: bool,
}

/// Writes one token of each sequence into the slots of its heads, and returns its queries. A cube
/// takes a key-value head and its query heads.
#[cube(launch_unchecked)]
pub(crate) fn write_kernel<E: Float, P: Float>(
    projected: &ProjectedTokens<E>,
    pool: &mut PoolSlots<P>,
    slots: &mut NewSlots,
    written: &mut NewTokens<E>,
    #[comptime] write: WriteBlueprint,
    #[define(E)] _dtype: ElemType,
    #[define(P)] _pool_dtype: ElemType,
) {
    let WriteBlueprint { heads: blueprint, place, weighted } = write;
    let half = comptime!(blueprint.head_dim / 2);
    let rows = comptime!(blueprint.rows());
    let queries = blueprint.query_heads.comptime();
    let kv_heads = blueprint.kv_heads.comptime();
    let group = comptime!(blueprint.query_heads / blueprint.kv_heads);
    let passes = comptime!((group + 2).div_ceil(blueprint.rows()));
    let mut squares = Shared::<[f32]>::new_slice(comptime!(blueprint.units));
    let here = CUBE_POS;
    if here >= slots.total_kv_heads {
        terminate!();
    }
    let sequence = here / kv_heads;
    let kv_head = here % kv_heads;
    let position = projected.positions[sequence];
    let length = slots.lengths[here];
    let mut slot = slots.offsets[here];
    let mut grown = length;
    if comptime!(place == PlacementKind::Append) {
        slot += length;
        grown += 1;
    }
    if comptime!(place == PlacementKind::Next) {
        slot += slots.next[here];
        if slots.next[here] == length {
            grown += 1;
        }
    }
    // The norm of this unit's elements of the value, as they are stored.
    let mut norm = 0.0f32;
    let unit = UNIT_POS as usize;
    let i = unit % half;
    #[unroll]
    for pass in 0..passes {
        // First the group's queries, then its key, then its value.
        let own = comptime!(pass * blueprint.rows()) + unit / half;
        let live = unit < rows * half && own < comptime!(group + 2);
        let mut head = kv_head * group + own;
        if own >= group {
            head = comptime!(blueprint.query_heads) + (own - group) * kv_heads + kv_head;
        }
        let pair = RotatedPair { token: sequence, head, position: position as usize, i, live };
        let pair = head_pair::<E>(projected, &pair, &mut squares, blueprint);
        if live {
            let first = E::cast_from(pair.extract(0usize));
            let second = E::cast_from(pair.extract(1usize));
            if own < group {
                let to = (sequence * queries + head) * blueprint.head_dim.comptime() + i;
                written.query[to] = first;
                written.query[to + half] = second;
            } else {
                let to = slot as usize * blueprint.head_dim.comptime() + i;
                if own == group {
                    pool.keys[to] = P::cast_from(first);
                    pool.keys[to + half] = P::cast_from(second);
                } else {
                    let (first, second) = (P::cast_from(first), P::cast_from(second));
                    pool.values[to] = first;
                    pool.values[to + half] = second;
                    norm += f32::cast_from(first).abs() + f32::cast_from(second).abs();
                }
            }
        }
    }
    if comptime!(place == PlacementKind::Next) {
        norm = plane_sum(norm);
        squares[unit] = norm;
    }
    // All units have read the length.
    sync_cube();
    if unit == 0 {
        slots.lengths[here] = grown;
        pool.positions[slot as usize] = position;
        if weighted {
            pool.log_weights[slot as usize] = 0.0f32;
        }
        if comptime!(place == PlacementKind::Next) {
            let mut total = 0.0f32;
            for plane in 0..CUBE_DIM / PLANE_DIM {
                total += squares[(plane * PLANE_DIM) as usize];
            }
            let mut log_norm = total.ln();
            // NaN is not 0: it stays NaN.
            if total == 0.0f32 {
                log_norm = f32::new(LOWEST_NORM);
            }
            written.log_norms[slot as usize] = log_norm;
        }
    }
}
