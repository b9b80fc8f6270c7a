//! The CubeCL kernels: a unit has elements `i` and `i + D / 2` of a head, which rotate together.

use cubecl::prelude::*;

use super::PlacementKind;
use crate::attention::evicting::LOWEST_NORM;

/// What fixes the generated code.
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

/// Elements `i` and `i + D / 2` of head `head` (queries, keys, values) of a token, as attention
/// takes them. All units of a cube must call it, `live` or not.
#[cube]
fn head_pair<E: Float>(
    projected: &[E],
    query_norm: &[E],
    key_norm: &[E],
    cos: &[f32],
    sin: &[f32],
    token: usize,
    head: usize,
    position: usize,
    i: usize,
    live: bool,
    squares: &mut Shared<[f32]>,
    epsilon: f32,
    #[comptime] blueprint: Blueprint,
) -> Vector<f32, Const<2>> {
    let half = comptime!(blueprint.head_dim / 2);
    let queries = blueprint.query_heads.comptime();
    let keys_end = comptime!(blueprint.query_heads + blueprint.kv_heads);
    let heads = comptime!(blueprint.query_heads + 2 * blueprint.kv_heads);
    let mut first = 0.0f32;
    let mut second = 0.0f32;
    if live {
        let at = (token * heads + head) * blueprint.head_dim.comptime() + i;
        first = f32::cast_from(projected[at]);
        second = f32::cast_from(projected[at + half]);
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
            let root = (mean + epsilon).sqrt();
            let mut weights = Vector::<f32, Const<2>>::new(0.0f32);
            if head < queries {
                weights.insert(0usize, f32::cast_from(query_norm[i]));
                weights.insert(1usize, f32::cast_from(query_norm[i + half]));
            } else {
                weights.insert(0usize, f32::cast_from(key_norm[i]));
                weights.insert(1usize, f32::cast_from(key_norm[i + half]));
            }
            // Rounded to the dtype before the weight and behind it, as the models' own code does.
            first = round::<E>(round::<E>(first / root) * weights.extract(0usize));
            second = round::<E>(round::<E>(second / root) * weights.extract(1usize));
        }
        sync_cube();
    }
    let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
    pair.insert(0usize, first);
    pair.insert(1usize, second);
    if comptime!(blueprint.rotates) && live && head < keys_end {
        let c = cos[position * half + i];
        let s = sin[position * half + i];
        pair.insert(0usize, first * c - second * s);
        pair.insert(1usize, second * c + first * s);
    }
    pair
}

#[cube]
fn round<E: Float>(x: f32) -> f32 {
    f32::cast_from(E::cast_from(x))
}

/// Splits projections of `tokens` tokens a sequence into heads.
///
/// # Shapes
/// `projected` `[B * T, (Hq + 2 Hkv) D]`; `query` `[B, Hq, T, D]`; `key`, `value` `[B, Hkv, T, D]`.
#[cube(launch_unchecked)]
pub(crate) fn split_kernel<E: Float>(
    projected: &[E],
    positions: &[i32],
    cos: &[f32],
    sin: &[f32],
    query_norm: &[E],
    key_norm: &[E],
    query: &mut [E],
    key: &mut [E],
    value: &mut [E],
    all: usize,
    tokens: usize,
    epsilon: f32,
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
    let live = unit < rows * half && row < all * heads;
    let token = row / heads;
    let head = row % heads;
    let mut position = 0usize;
    if live {
        position = positions[token] as usize;
    }
    let pair = head_pair::<E>(
        projected,
        query_norm,
        key_norm,
        cos,
        sin,
        token,
        head,
        position,
        i,
        live,
        &mut squares,
        epsilon,
        blueprint,
    );
    if live {
        let (sequence, at) = (token / tokens, token % tokens);
        let first = E::cast_from(pair.extract(0usize));
        let second = E::cast_from(pair.extract(1usize));
        let dim = blueprint.head_dim.comptime();
        if head < queries {
            let to = ((sequence * queries + head) * tokens + at) * dim + i;
            query[to] = first;
            query[to + half] = second;
        } else if head < queries + kv_heads {
            let to = ((sequence * kv_heads + head - queries) * tokens + at) * dim + i;
            key[to] = first;
            key[to + half] = second;
        } else {
            let to = ((sequence * kv_heads + head - queries - kv_heads) * tokens + at) * dim + i;
            value[to] = first;
            value[to + half] = second;
        }
    }
}

/// Writes one token a sequence into the slots of its heads and returns its queries; a cube has a
/// key-value head and its queries.
///
/// # Shapes
/// `projected` `[B, (Hq + 2 Hkv) D]`, `query` `[B, Hq, D]`; `keys`, `values` `[S, D]`;
/// `slot_positions`, `log_weights` and `log_norms` `[S]`.
#[cube(launch_unchecked)]
pub(crate) fn write_kernel<E: Float, P: Float>(
    projected: &[E],
    positions: &[i32],
    cos: &[f32],
    sin: &[f32],
    query_norm: &[E],
    key_norm: &[E],
    query: &mut [E],
    keys: &mut [P],
    values: &mut [P],
    slot_positions: &mut [i32],
    log_weights: &mut [f32],
    log_norms: &mut [f32],
    offsets: &[i32],
    lengths: &mut [i32],
    next: &[i32],
    pairs: usize,
    epsilon: f32,
    #[comptime] blueprint: Blueprint,
    #[comptime] place: PlacementKind,
    #[comptime] weighted: bool,
    #[define(E)] _dtype: ElemType,
    #[define(P)] _pool: ElemType,
) {
    let half = comptime!(blueprint.head_dim / 2);
    let rows = comptime!(blueprint.rows());
    let queries = blueprint.query_heads.comptime();
    let kv_heads = blueprint.kv_heads.comptime();
    let group = comptime!(blueprint.query_heads / blueprint.kv_heads);
    let passes = comptime!((group + 2).div_ceil(blueprint.rows()));
    let mut squares = Shared::<[f32]>::new_slice(comptime!(blueprint.units));
    let here = CUBE_POS;
    if here >= pairs {
        terminate!();
    }
    let sequence = here / kv_heads;
    let kv_head = here % kv_heads;
    let position = positions[sequence];
    let length = lengths[here];
    // Given slots stand in place of the offsets.
    let mut slot = offsets[here];
    let mut grown = length;
    if comptime!(place == PlacementKind::Append) {
        slot += length;
        grown += 1;
    }
    if comptime!(place == PlacementKind::Next) {
        slot += next[here];
        if next[here] == length {
            grown += 1;
        }
    }
    // Of this unit's elements of the value, as they are stored.
    let mut norm = 0.0f32;
    let unit = UNIT_POS as usize;
    let i = unit % half;
    #[unroll]
    for pass in 0..passes {
        // The group's queries, then its key and its value.
        let own = comptime!(pass * blueprint.rows()) + unit / half;
        let live = unit < rows * half && own < comptime!(group + 2);
        let mut head = kv_head * group + own;
        if own >= group {
            head = comptime!(blueprint.query_heads) + (own - group) * kv_heads + kv_head;
        }
        let pair = head_pair::<E>(
            projected,
            query_norm,
            key_norm,
            cos,
            sin,
            sequence,
            head,
            position as usize,
            i,
            live,
            &mut squares,
            epsilon,
            blueprint,
        );
        if live {
            let first = E::cast_from(pair.extract(0usize));
            let second = E::cast_from(pair.extract(1usize));
            if own < group {
                let to = (sequence * queries + head) * blueprint.head_dim.comptime() + i;
                query[to] = first;
                query[to + half] = second;
            } else if slot >= 0 {
                let to = slot as usize * blueprint.head_dim.comptime() + i;
                if own == group {
                    keys[to] = P::cast_from(first);
                    keys[to + half] = P::cast_from(second);
                } else {
                    let (first, second) = (P::cast_from(first), P::cast_from(second));
                    values[to] = first;
                    values[to + half] = second;
                    norm += f32::cast_from(first).abs() + f32::cast_from(second).abs();
                }
            }
        }
    }
    if comptime!(place == PlacementKind::Next) {
        norm = plane_sum(norm);
        squares[unit] = norm;
    }
    // Everybody knows the length by then.
    sync_cube();
    if unit == 0 {
        if comptime!(place != PlacementKind::Slots) {
            lengths[here] = grown;
        }
        if slot >= 0 {
            slot_positions[slot as usize] = position;
            if weighted {
                log_weights[slot as usize] = 0.0f32;
            }
            if comptime!(place == PlacementKind::Next) {
                let mut total = 0.0f32;
                for plane in 0..CUBE_DIM / PLANE_DIM {
                    total += squares[(plane * PLANE_DIM) as usize];
                }
                let mut log_norm = total.ln();
                // NaN is no zero, and goes on.
                if total == 0.0f32 {
                    log_norm = f32::new(LOWEST_NORM);
                }
                log_norms[slot as usize] = log_norm;
            }
        }
    }
}
