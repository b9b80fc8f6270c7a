//! The kernel of `update_sketch`, with one cube a range: adds probabilities to scores, evicts in
//! bulk, and exchanges tokens between slots and sketch.

use cubecl::prelude::*;

use super::ABSENT;
use super::accumulate::{Share, accumulate_part, first_recent};
use super::blueprint::UpdateBlueprint;
use super::choose::ShrinkingRange;
use super::evict::evict;
use super::kernel_args::{ExactTokens, Moves, StepLogits, TokenScores};
use super::search::{RangeTokens, SearchedSlots, Weakest, highest, lowest, top_of, weakest};
use crate::components::barrier::sync_memory;
use crate::components::sentinels::{NO_INDEX, NO_MINIMUM};
use crate::sketch::count_sketch::HEAD_FIELDS;
use crate::sketch::count_sketch::hash::kernel::{hash_of, key_sign, sign_of};
use crate::sketch::count_sketch::kernel_args::Sketch;
use crate::sketch::count_sketch::query::median;

#[cube(launch_unchecked)]
pub(crate) fn update_kernel<F: Float>(
    sketch: &mut Sketch,
    exact: &mut ExactTokens<F>,
    tokens: &mut TokenScores,
    step: &StepLogits,
    moves: &mut Moves,
    #[comptime] blueprint: UpdateBlueprint,
    #[define(F)] _dtype: ElemType,
) {
    let UpdateBlueprint { columns, accumulates, fenced, scores: accumulation, sketch: config } =
        blueprint;
    let buckets = config.buckets.comptime();
    let planes = accumulation.planes.comptime();
    let kv_head = CUBE_POS;
    if kv_head >= step.total_kv_heads {
        terminate!();
    }
    let head = kv_head * HEAD_FIELDS;
    let first_entry = sketch.heads[head] as usize;
    let entries = sketch.heads[head + 1] as usize;
    let first_token = sketch.heads[head + 2] as usize;
    let limit = sketch.heads[head + 4];
    let recents = sketch.heads[head + 5];
    let behind = step.newest[kv_head / step.kv_heads] + 1i32;
    let seen = max(min(behind, sketch.heads[head + 3]), 0i32) as usize;
    let start = exact.slots.offsets[kv_head] as usize;
    let unit = UNIT_POS as usize;
    // The first units take keys, the later ones values.
    let is_key = unit < columns;
    let column = select(is_key, unit, unit - columns);
    let mine = unit < comptime!(2 * columns);
    let held = exact.slots.lengths[kv_head];

    // The two candidates of an exchange: the slot of the lowest score, and the token of the highest
    // score, negated.
    let mut low = Weakest { value: f32::new(NO_MINIMUM), at: i32::new(NO_INDEX as i64) };
    let mut top = Weakest { value: f32::new(NO_MINIMUM), at: i32::new(NO_INDEX as i64) };
    if accumulates {
        let share = Share { kv_head, of: 0usize, parts: 1usize };
        let found =
            accumulate_part(&mut exact.slots, tokens, step, &sketch.heads, &share, accumulation);
        top.set(weakest(found.top, found.top_at, planes));
        low.set(weakest(found.low, found.low_at, planes));
        if unit == 0 {
            tokens.tops[kv_head] = top.value;
            tokens.tops_at[kv_head] = top.at;
        }
        sync_memory(fenced);
    }
    if entries == 0 {
        terminate!();
    }

    // A range beyond its slack evicts all of its surplus at once.
    let mut length = held;
    let mut gone = 0i32;
    if length > limit + moves.slack {
        let range = ShrinkingRange { start, held, limit, bound: behind - recents };
        let (left, absorbed) = evict(sketch, exact, tokens, kv_head, &range, blueprint);
        length = left;
        gone = absorbed;
    }

    // A token with a score high enough changes places with the slot of the lowest score.
    let recent = first_recent(length, limit, recents, behind);
    let mut swapped = 0i32;
    let mut anew = !accumulates.runtime() || length != held;
    let mut goes_on = true;
    while goes_on {
        if anew {
            let slots = length as usize;
            let among = SearchedSlots { start, length: slots, bound: recent };
            low.set(lowest(&exact.slots, &among, accumulation));
            top.set(highest(&*tokens, kv_head, accumulation));
        }
        goes_on = false;
        if low.at != NO_INDEX && top.at != NO_INDEX {
            // NaN exchanges nothing.
            goes_on = low.value * moves.replace_rate < -top.value;
        }
        if goes_on {
            let token = top.at;
            let slot = start + low.at as usize;
            let old = exact.slots.positions[slot] as usize;
            let row = slot * columns + column;
            if mine {
                let mut rows = Array::<usize>::new(buckets);
                let mut signs = Array::<f32>::new(buckets);
                let mut parts_of = Array::<Vector<f32, Const<4>>>::new(buckets);
                #[unroll]
                for bucket in 0..buckets {
                    let place = hash_of(
                        &sketch.hashes,
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
                        parts_of[bucket] = sketch.keys[rows[bucket]] * Vector::new(signs[bucket]);
                    } else {
                        signs[bucket] = sign_of(place);
                        parts_of[bucket] = sketch.values[rows[bucket]] * Vector::new(signs[bucket]);
                    }
                }
                // Rounded as the slot will hold it.
                let revived = Vector::<F, Const<4>>::cast_from(median::<f32, Const<4>>(
                    &mut parts_of,
                    buckets,
                ));
                let taken = Vector::<f32, Const<4>>::cast_from(revived);
                #[unroll]
                for bucket in 0..buckets {
                    if is_key {
                        sketch.keys[rows[bucket]] -= taken * Vector::new(signs[bucket]);
                    } else {
                        sketch.values[rows[bucket]] -= taken * Vector::new(signs[bucket]);
                    }
                }
                #[unroll]
                for bucket in 0..buckets {
                    let place = hash_of(
                        &sketch.hashes,
                        kv_head,
                        bucket.runtime(),
                        old as u32,
                        entries as u32,
                        config,
                    );
                    let entry = first_entry + bucket * entries + (place / 2u32) as usize;
                    let at = entry * columns + column;
                    if is_key {
                        let key = Vector::<f32, Const<4>>::cast_from(exact.pool.keys[row]);
                        sketch.keys[at] += key * Vector::new(key_sign(place, config));
                    } else {
                        let value = Vector::<f32, Const<4>>::cast_from(exact.pool.values[row]);
                        sketch.values[at] += value * Vector::new(sign_of(place));
                    }
                }
                if is_key {
                    exact.pool.keys[row] = revived;
                } else {
                    exact.pool.values[row] = revived;
                }
            }
            // All units have read the numbers that the first unit is about to write.
            sync_cube();
            if unit == 0 {
                tokens.scores[first_token + old] = low.value;
                tokens.scores[first_token + token as usize] = f32::new(ABSENT);
                exact.slots.scores[slot] = -top.value;
                exact.slots.positions[slot] = token;
            }
            sync_memory(fenced);
            // The parts that lost and gained a token are searched again.
            let lost = token as usize / tokens.part;
            let gained = old / tokens.part;
            let range = RangeTokens { kv_head, first_token, seen };
            top_of(tokens, &range, lost, fenced, accumulation);
            if gained != lost {
                top_of(tokens, &range, gained, fenced, accumulation);
            }
            swapped += 1i32;
            anew = true;
        }
    }
    if unit == 0 {
        if length != held {
            exact.slots.lengths[kv_head] = length;
        }
        if gone + swapped > 0i32 {
            moves.moved[2 * kv_head] += gone;
            moves.moved[2 * kv_head + 1] += swapped;
        }
    }
}
