//! The kernel that moves tokens between slots and sketch: a cube a range.

use cubecl::prelude::*;

use super::ABSENT;
use super::accumulate::{Blueprint, accumulate_part, first_recent};
use super::evict::evict;
use super::search::{Weakest, highest, lowest, top_of, weakest};
use crate::components::barrier::sync_memory;
use crate::components::sentinels::{NO_INDEX, NO_MINIMUM};
use crate::sketch::count_sketch::hash::kernel::{hash_of, key_sign, sign_of};
use crate::sketch::count_sketch::query::median;
use crate::sketch::count_sketch::{HEAD_FIELDS, SketchConfig};

/// # Shapes
/// In vectors of 4: `sketch_keys`, `sketch_values` `[N, columns]`, `keys`, `values` `[S, columns]`;
/// `moved` `[total_kv_heads, 2]`; `tops` and `tops_at` `[total_kv_heads, parts]` as the
/// accumulation leaves them, unless it is done here. A cube has two units a vector of a row, at
/// least.
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
    total_kv_heads: usize,
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
    let kv_head = CUBE_POS;
    if kv_head >= total_kv_heads {
        terminate!();
    }
    let head = kv_head * HEAD_FIELDS;
    let first_entry = heads[head] as usize;
    let entries = heads[head + 1] as usize;
    let first_token = heads[head + 2] as usize;
    let limit = heads[head + 4];
    let recents = heads[head + 5];
    let behind = newest[kv_head / kv_heads] + 1i32;
    let seen = max(min(behind, heads[head + 3]), 0i32) as usize;
    let start = offsets[kv_head] as usize;
    let unit = UNIT_POS as usize;
    // Keys before values.
    let is_key = unit < columns;
    let column = select(is_key, unit, unit - columns);
    let mine = unit < comptime!(2 * columns);
    let held = lengths[kv_head];

    // What may change places: the slot of the lowest score, and the token of the highest, negated.
    let mut low = Weakest { value: f32::new(NO_MINIMUM), at: i32::new(NO_INDEX as i64) };
    let mut top = Weakest { value: f32::new(NO_MINIMUM), at: i32::new(NO_INDEX as i64) };
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
            kv_head,
            kv_heads,
            0usize,
            1usize,
            part,
            blueprint,
        );
        top.set(weakest(found.top, found.top_at, planes));
        low.set(weakest(found.low, found.low_at, planes));
        if unit == 0 {
            tops[kv_head] = top.value;
            tops_at[kv_head] = top.at;
        }
        sync_memory(fenced);
    }
    if entries == 0 {
        terminate!();
    }

    // More than the slack: the surplus goes at once.
    let mut length = held;
    let mut gone = 0i32;
    if length > limit + slack {
        let (left, absorbed) = evict(
            sketch_keys,
            sketch_values,
            keys,
            values,
            positions,
            slot_scores,
            token_scores,
            tops,
            tops_at,
            heads,
            hashes,
            kv_head,
            start,
            held,
            behind - recents,
            parts,
            part,
            columns,
            fenced,
            blueprint,
            config,
        );
        length = left;
        gone = absorbed;
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
            top.set(highest(&*tops, &*tops_at, kv_head * parts, parts, blueprint));
        }
        goes_on = false;
        if low.at != NO_INDEX && top.at != NO_INDEX {
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
                    let place = hash_of(
                        hashes,
                        kv_head,
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
                    let place = hash_of(
                        hashes,
                        kv_head,
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
                kv_head * parts,
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
                    kv_head * parts,
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
            lengths[kv_head] = length;
        }
        if gone + swapped > 0i32 {
            moved[2 * kv_head] += gone;
            moved[2 * kv_head + 1] += swapped;
        }
    }
}
