//! The kernel that moves tokens between slots and sketch: a cube a range.

use cubecl::prelude::*;

use super::ABSENT;
use super::accumulate::{Blueprint, SLOTS_AHEAD, accumulate_part, first_recent};
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
    let pair = CUBE_POS;
    if pair >= pairs {
        terminate!();
    }
    let head = pair * HEAD_FIELDS;
    let first_entry = heads[head] as usize;
    let entries = heads[head + 1] as usize;
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
    let held = lengths[pair];

    // What may change places: the slot of the lowest score, and the token of the highest, negated.
    let mut low = Weakest { value: f32::new(INFINITE), at: i32::new(NOWHERE as i64) };
    let mut top = Weakest { value: f32::new(INFINITE), at: i32::new(NOWHERE as i64) };
    if accumulates {
        let found = accumulate_part(
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
        top.set(weakest(found.top, found.top_at, planes));
        low.set(weakest(found.low, found.low_at, planes));
        if unit == 0 {
            tops[pair] = top.value;
            tops_at[pair] = top.at;
        }
        sync_memory(fenced);
    }
    if entries == 0 {
        terminate!();
    }

    // More than the slack: the surplus goes at once.
    let mut length = held;
    let mut surplus = 0i32;
    if length > limit + slack {
        surplus = length - limit;
    }
    let mut gone = 0i32;
    while gone < surplus {
        let victim =
            lowest(&*slot_scores, &*positions, start, length as usize, behind - recents, blueprint);
        if victim.at == NOWHERE {
            // All are recent, as those of a sequence that has ended and stays where it is: the last go,
            // and nothing remembers them.
            length -= surplus - gone;
            surplus = gone;
        } else {
            let slot = start + victim.at as usize;
            let last = start + length as usize - 1;
            // All that is read is asked for before any of it is changed.
            let index = positions[slot];
            let moved_index = positions[last];
            let moved_score = slot_scores[last];
            let at = pair * parts + index as usize / part;
            let (before, before_at) = (tops[at], tops_at[at]);
            if mine {
                let mut rows = Array::<usize>::new(buckets);
                let mut signs = Array::<f32>::new(buckets);
                #[unroll]
                for bucket in 0..buckets {
                    let place = place_of(
                        hashes,
                        pair,
                        bucket.runtime(),
                        index as u32,
                        entries as u32,
                        config,
                    );
                    let entry = first_entry + bucket * entries + (place / 2u32) as usize;
                    rows[bucket] = entry * columns + column;
                    signs[bucket] = select(is_key, key_sign(place, config), sign_of(place));
                }
                let (own, moved) = (slot * columns + column, last * columns + column);
                if is_key {
                    absorb(sketch_keys, keys, &rows, &signs, own, moved, buckets);
                } else {
                    absorb(sketch_values, values, &rows, &signs, own, moved, buckets);
                }
            }
            // All units have read what the first is about to write.
            sync_cube();
            if unit == 0 {
                token_scores[first_token + index as usize] = victim.value;
                if before_at == NOWHERE
                    || -victim.value < before
                    || (-victim.value == before && index < before_at)
                {
                    tops[at] = -victim.value;
                    tops_at[at] = index;
                }
                positions[slot] = moved_index;
                slot_scores[slot] = moved_score;
            }
            sync_memory(fenced);
            length -= 1i32;
            gone += 1i32;
        }
    }

    // Tokens that matter more than slots change places with them.
    let recent = first_recent(length, limit, recents, behind);
    let mut swapped = 0i32;
    let mut anew = !accumulates.runtime() || length != held;
    let mut goes_on = true;
    while goes_on {
        if anew {
            let slots = length as usize;
            low.set(lowest(&*slot_scores, &*positions, start, slots, recent, blueprint));
            top.set(highest(&*tops, &*tops_at, pair * parts, parts, blueprint));
        }
        goes_on = false;
        if low.at != NOWHERE && top.at != NOWHERE {
            // NaN swaps nothing.
            goes_on = low.value * replace_rate < -top.value;
        }
        if goes_on {
            let token = top.at;
            let slot = start + low.at as usize;
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
            // All units have read what the first is about to write.
            sync_cube();
            if unit == 0 {
                token_scores[first_token + old] = low.value;
                token_scores[first_token + token as usize] = f32::new(ABSENT);
                slot_scores[slot] = -top.value;
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
            anew = true;
        }
    }
    if unit == 0 {
        if length != held {
            lengths[pair] = length;
        }
        if gone + swapped > 0i32 {
            moved[2 * pair] += gone;
            moved[2 * pair + 1] += swapped;
        }
    }
}

/// A score, and where it was found.
#[derive(CubeType)]
struct Weakest {
    value: f32,
    /// [`NOWHERE`] if there is none.
    at: i32,
}

#[cube]
impl Weakest {
    fn set(&mut self, other: Weakest) {
        self.value = other.value;
        self.at = other.at;
    }
}

/// The least of what the cube's units have found, the first among equals.
#[cube]
fn weakest(value: f32, at: i32, #[comptime] planes: usize) -> Weakest {
    let (value, at) = weakest_of(value, at, planes);
    Weakest { value, at }
}

/// Adds what a slot holds to its entries, and puts another slot's in its place. All is read before the first is
/// written, so that it comes at once; buckets have no entry in common.
#[cube]
fn absorb<F: Float>(
    sketch: &mut [Vector<f32, Const<4>>],
    slots: &mut [Vector<F, Const<4>>],
    rows: &Array<usize>,
    signs: &Array<f32>,
    own: usize,
    moved: usize,
    #[comptime] buckets: usize,
) {
    let row = Vector::<f32, Const<4>>::cast_from(slots[own]);
    let instead = slots[moved];
    let mut held = Array::<Vector<f32, Const<4>>>::new(buckets);
    #[unroll]
    for bucket in 0..buckets {
        held[bucket] = sketch[rows[bucket]];
    }
    #[unroll]
    for bucket in 0..buckets {
        sketch[rows[bucket]] = held[bucket] + row * Vector::new(signs[bucket]);
    }
    slots[own] = instead;
}

#[cube]
fn key_sign(place: u32, #[comptime] config: SketchConfig) -> f32 {
    let mut sign = 1.0f32;
    if comptime!(config.signed_keys) {
        sign = sign_of(place);
    }
    sign
}

/// The lowest score among slots of tokens before `bound`.
#[cube]
fn lowest(
    slot_scores: &[f32],
    positions: &[i32],
    start: usize,
    length: usize,
    bound: i32,
    #[comptime] blueprint: Blueprint,
) -> Weakest {
    let units = blueprint.units.comptime();
    let mut best = f32::new(INFINITE);
    let mut best_at = i32::new(NOWHERE as i64);
    let mut first = UNIT_POS as usize;
    while first < length {
        let mut places = Array::<i32>::new(SLOTS_AHEAD);
        let mut scores = Array::<f32>::new(SLOTS_AHEAD);
        #[unroll]
        for a in 0..SLOTS_AHEAD {
            let slot = start + min(first + a * units, length - 1);
            places[a] = positions[slot];
            scores[a] = slot_scores[slot];
        }
        #[unroll]
        for a in 0..SLOTS_AHEAD {
            let i = first + a * units;
            if i < length && places[a] < bound && scores[a] < best {
                best = scores[a];
                best_at = i32::cast_from(i);
            }
        }
        first += comptime!(SLOTS_AHEAD * units);
    }
    weakest(best, best_at, blueprint.planes)
}

/// The highest score of all parts' tokens, negated.
#[cube]
fn highest(
    tops: &[f32],
    tops_at: &[i32],
    first_part: usize,
    parts: usize,
    #[comptime] blueprint: Blueprint,
) -> Weakest {
    let mut best = f32::new(INFINITE);
    let mut best_at = i32::new(NOWHERE as i64);
    let mut of = UNIT_POS as usize;
    while of < parts {
        let (top, top_at) = (tops[first_part + of], tops_at[first_part + of]);
        if top_at != NOWHERE && (best_at == NOWHERE || top < best) {
            best = top;
            best_at = top_at;
        }
        of += comptime!(blueprint.units);
    }
    weakest(best, best_at, blueprint.planes)
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
