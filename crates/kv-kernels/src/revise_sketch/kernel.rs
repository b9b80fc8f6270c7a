//! The kernel that moves tokens between slots and sketch: a cube a range.

use cubecl::prelude::*;

use super::ABSENT;
use super::accumulate::{AHEAD, Blueprint, accumulate_part};
use crate::barrier::sync_memory;
use crate::count_sketch::hash::kernel::{place_of, sign_of};
use crate::count_sketch::query::median;
use crate::count_sketch::{HEAD_FIELDS, SketchConfig};
use crate::evicting_attention::weigh::{ABSENT as INFINITE, NOWHERE, weakest_of};

/// # Shapes
/// In vectors of 4: `sketch_keys`, `sketch_values` `[N, columns]`, `keys`, `values` `[S, columns]`; `moved`
/// `[pairs, 2]`; `tops` and `tops_at` `[pairs, parts]` as the accumulation leaves them, unless it is done
/// here. A cube has two units a vector of a row, at least.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn revise_kernel<F: Float>(
    sketch_keys: &mut [Vector<f32, Const<4>>],
    sketch_values: &mut [Vector<f32, Const<4>>],
    keys: &mut [Vector<F, Const<4>>],
    values: &mut [Vector<F, Const<4>>],
    positions: &mut [i32],
    slot_scores: &mut [f32],
    token_scores: &mut [f32],
    lengths: &mut [i32],
    moved: &mut [i32],
    tops: &mut [f32],
    tops_at: &mut [i32],
    slot_logits: &[f32],
    token_logits: &[f32],
    log_sum_exp: &[f32],
    offsets: &[i32],
    heads: &[i32],
    hashes: &[i32],
    newest: &[i32],
    pairs: usize,
    kv_heads: usize,
    parts: usize,
    part: usize,
    slack: i32,
    replace_rate: f32,
    #[comptime] columns: usize,
    #[comptime] accumulates: bool,
    #[comptime] fenced: bool,
    #[comptime] blueprint: Blueprint,
    #[comptime] config: SketchConfig,
    #[define(F)] _dtype: ElemType,
) {
    let buckets = config.buckets.comptime();
    let planes = blueprint.planes.comptime();
    let units = blueprint.units.comptime();
    let pair = CUBE_POS;
    if pair >= pairs {
        terminate!();
    }
    if accumulates {
        let (top, top_at) = accumulate_part(
            slot_scores,
            token_scores,
            slot_logits,
            token_logits,
            log_sum_exp,
            &*positions,
            offsets,
            &*lengths,
            heads,
            newest,
            pair,
            kv_heads,
            0usize,
            1usize,
            part,
            blueprint,
        );
        if UNIT_POS == 0 {
            tops[pair] = top;
            tops_at[pair] = top_at;
        }
        sync_memory(fenced);
    }
    let head = pair * HEAD_FIELDS;
    let first_entry = heads[head] as usize;
    let entries = heads[head + 1] as usize;
    if entries == 0 {
        terminate!();
    }
    let first_token = heads[head + 2] as usize;
    let limit = heads[head + 4];
    let recents = heads[head + 5];
    let behind = newest[pair / kv_heads] + 1i32;
    let seen = max(min(behind, heads[head + 3]), 0i32) as usize;
    let start = offsets[pair] as usize;
    let unit = UNIT_POS as usize;
    // Keys before values.
    let is_key = unit < columns;
    let column = select(is_key, unit, unit - columns);
    let mine = unit < comptime!(2 * columns);
    let mut length = lengths[pair];

    // More than the slack: the surplus goes at once.
    let mut surplus = 0i32;
    if length > limit + slack {
        surplus = length - limit;
    }
    let mut gone = 0i32;
    while gone < surplus {
        let victim =
            lowest(&*slot_scores, &*positions, start, length as usize, behind - recents, blueprint);
        if victim == NOWHERE {
            // All are recent, as those of a sequence that has ended and stays where it is: the last go,
            // and nothing remembers them.
            length -= surplus - gone;
            surplus = gone;
        } else {
            let slot = start + victim as usize;
            let last = start + length as usize - 1;
            let token = positions[slot] as usize;
            #[unroll]
            for bucket in 0..buckets {
                let place =
                    place_of(hashes, pair, bucket.runtime(), token as u32, entries as u32, config);
                let entry = first_entry + bucket * entries + (place / 2u32) as usize;
                let at = entry * columns + column;
                if mine {
                    if is_key {
                        let row = Vector::<f32, Const<4>>::cast_from(keys[slot * columns + column]);
                        sketch_keys[at] += row * Vector::new(key_sign(place, config));
                    } else {
                        let row =
                            Vector::<f32, Const<4>>::cast_from(values[slot * columns + column]);
                        sketch_values[at] += row * Vector::new(sign_of(place));
                    }
                }
            }
            if mine {
                if is_key {
                    keys[slot * columns + column] = keys[last * columns + column];
                } else {
                    values[slot * columns + column] = values[last * columns + column];
                }
            }
            // Whoever reads the slot's token has done so.
            sync_cube();
            if unit == 0 {
                let score = slot_scores[slot];
                token_scores[first_token + token] = score;
                let at = pair * parts + token / part;
                let index = i32::cast_from(token);
                if tops_at[at] == NOWHERE
                    || -score < tops[at]
                    || (-score == tops[at] && index < tops_at[at])
                {
                    tops[at] = -score;
                    tops_at[at] = index;
                }
                positions[slot] = positions[last];
                slot_scores[slot] = slot_scores[last];
            }
            sync_memory(fenced);
            length -= 1i32;
            gone += 1i32;
        }
    }

    // Tokens that matter more than slots change places with them.
    let recent = max(length - (limit - recents), 0i32);
    let mut swapped = 0i32;
    let mut goes_on = true;
    while goes_on {
        let candidate =
            lowest(&*slot_scores, &*positions, start, length as usize, behind - recent, blueprint);
        let mut best = 1.0f32;
        let mut best_at = i32::new(NOWHERE as i64);
        let mut own = unit;
        while own < parts {
            let top = tops[pair * parts + own];
            let top_at = tops_at[pair * parts + own];
            if top_at != NOWHERE && (best_at == NOWHERE || top < best) {
                best = top;
                best_at = top_at;
            }
            own += units;
        }
        let (top, token) = weakest_of(best, best_at, planes);
        goes_on = false;
        if candidate != NOWHERE && token != NOWHERE {
            // NaN swaps nothing.
            goes_on = slot_scores[start + candidate as usize] * replace_rate < -top;
        }
        // All units have read what the first is about to write.
        sync_cube();
        if goes_on {
            let slot = start + candidate as usize;
            let old = positions[slot] as usize;
            let row = slot * columns + column;
            if mine {
                let mut rows = Array::<usize>::new(buckets);
                let mut signs = Array::<f32>::new(buckets);
                let mut parts_of = Array::<Vector<f32, Const<4>>>::new(buckets);
                #[unroll]
                for bucket in 0..buckets {
                    let place = place_of(
                        hashes,
                        pair,
                        bucket.runtime(),
                        token as u32,
                        entries as u32,
                        config,
                    );
                    let entry = first_entry + bucket * entries + (place / 2u32) as usize;
                    rows[bucket] = entry * columns + column;
                    if is_key {
                        signs[bucket] = key_sign(place, config);
                        parts_of[bucket] = sketch_keys[rows[bucket]] * Vector::new(signs[bucket]);
                    } else {
                        signs[bucket] = sign_of(place);
                        parts_of[bucket] = sketch_values[rows[bucket]] * Vector::new(signs[bucket]);
                    }
                }
                // As the slot will hold it.
                let revived = Vector::<F, Const<4>>::cast_from(median::<f32, Const<4>>(
                    &mut parts_of,
                    buckets,
                ));
                let taken = Vector::<f32, Const<4>>::cast_from(revived);
                #[unroll]
                for bucket in 0..buckets {
                    if is_key {
                        sketch_keys[rows[bucket]] -= taken * Vector::new(signs[bucket]);
                    } else {
                        sketch_values[rows[bucket]] -= taken * Vector::new(signs[bucket]);
                    }
                }
                #[unroll]
                for bucket in 0..buckets {
                    let place = place_of(
                        hashes,
                        pair,
                        bucket.runtime(),
                        old as u32,
                        entries as u32,
                        config,
                    );
                    let entry = first_entry + bucket * entries + (place / 2u32) as usize;
                    let at = entry * columns + column;
                    if is_key {
                        let key = Vector::<f32, Const<4>>::cast_from(keys[row]);
                        sketch_keys[at] += key * Vector::new(key_sign(place, config));
                    } else {
                        let value = Vector::<f32, Const<4>>::cast_from(values[row]);
                        sketch_values[at] += value * Vector::new(sign_of(place));
                    }
                }
                if is_key {
                    keys[row] = revived;
                } else {
                    values[row] = revived;
                }
            }
            sync_cube();
            if unit == 0 {
                token_scores[first_token + old] = slot_scores[slot];
                token_scores[first_token + token as usize] = f32::new(ABSENT);
                slot_scores[slot] = -top;
                positions[slot] = token;
            }
            sync_memory(fenced);
            // The parts that lost and gained a token are looked through again.
            let lost = token as usize / part;
            let gained = old / part;
            top_of(
                &*token_scores,
                tops,
                tops_at,
                pair * parts,
                first_token,
                lost,
                part,
                seen,
                fenced,
                blueprint,
            );
            if gained != lost {
                top_of(
                    &*token_scores,
                    tops,
                    tops_at,
                    pair * parts,
                    first_token,
                    gained,
                    part,
                    seen,
                    fenced,
                    blueprint,
                );
            }
            swapped += 1i32;
        }
    }
    if unit == 0 {
        lengths[pair] = length;
        moved[2 * pair] += gone;
        moved[2 * pair + 1] += swapped;
    }
}

#[cube]
fn key_sign(place: u32, #[comptime] config: SketchConfig) -> f32 {
    let mut sign = 1.0f32;
    if comptime!(config.signed_keys) {
        sign = sign_of(place);
    }
    sign
}

/// The place of the lowest score among slots of tokens before `bound`.
#[cube]
fn lowest(
    slot_scores: &[f32],
    positions: &[i32],
    start: usize,
    length: usize,
    bound: i32,
    #[comptime] blueprint: Blueprint,
) -> i32 {
    let units = blueprint.units.comptime();
    let mut best = f32::new(INFINITE);
    let mut best_at = i32::new(NOWHERE as i64);
    let mut first = UNIT_POS as usize;
    while first < length {
        let mut places = Array::<i32>::new(AHEAD);
        let mut scores = Array::<f32>::new(AHEAD);
        #[unroll]
        for a in 0..AHEAD {
            let slot = start + min(first + a * units, length - 1);
            places[a] = positions[slot];
            scores[a] = slot_scores[slot];
        }
        #[unroll]
        for a in 0..AHEAD {
            let i = first + a * units;
            if i < length && places[a] < bound && scores[a] < best {
                best = scores[a];
                best_at = i32::cast_from(i);
            }
        }
        first += comptime!(AHEAD * units);
    }
    let (_, place) = weakest_of(best, best_at, blueprint.planes);
    place
}

/// Finds a part's highest score anew.
#[cube]
#[allow(clippy::too_many_arguments)]
fn top_of(
    token_scores: &[f32],
    tops: &mut [f32],
    tops_at: &mut [i32],
    first_part: usize,
    first_token: usize,
    of: usize,
    part: usize,
    seen: usize,
    #[comptime] fenced: bool,
    #[comptime] blueprint: Blueprint,
) {
    let mut best = 1.0f32;
    let mut best_at = i32::new(NOWHERE as i64);
    let end = min((of + 1) * part, seen);
    let mut token = of * part + UNIT_POS as usize;
    while token < end {
        let score = token_scores[first_token + token];
        if score >= 0.0f32 && (best_at == NOWHERE || -score < best) {
            best = -score;
            best_at = i32::cast_from(token);
        }
        token += comptime!(blueprint.units);
    }
    let (top, top_at) = weakest_of(best, best_at, blueprint.planes);
    if UNIT_POS == 0 {
        tops[first_part + of] = top;
        tops_at[first_part + of] = top_at;
    }
    sync_memory(fenced);
}
