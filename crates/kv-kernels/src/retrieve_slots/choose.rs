//! The end of a step: a set of the highest scores where one is retrieved, and what the step reads.

use cubecl::prelude::*;

use super::ScoreReduction;
use super::decide::{Sight, first_in_sight};
use super::kernel::Blueprint;
use super::radix::{PLANES, edges, exclusive};
use super::table::*;
use crate::decode_attention::shared::{LOWEST, larger};
use crate::select::high_of;

/// Marks of a slot: among the highest, among the best of them.
const HIGHEST: u32 = 1;
const BEST: u32 = 2;

/// The log-sum-exp of each query over the slots in sight.
#[cube]
pub(super) fn log_sums(
    logits: &[f32],
    base: usize,
    stride: usize,
    sight: &Sight,
    #[comptime] group: usize,
    #[comptime] units: usize,
) -> Array<f32> {
    let gap = sight.start - sight.sinks;
    let count = sight.length - gap;
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    let planes = (CUBE_DIM / PLANE_DIM) as usize;
    let mut parts = Shared::<[f32]>::new_slice(comptime!(PLANES * group));
    let mut sums = Array::<f32>::new(group);
    let mut tops = Array::<f32>::new(group);
    #[unroll]
    for g in 0..group {
        let mut top = f32::new(LOWEST);
        let mut i = UNIT_POS as usize;
        while i < count {
            let slot = select(i < sight.sinks, i, i + gap);
            top = larger(top, logits[base + g * stride + slot]);
            i += units;
        }
        top = plane_max(top);
        if UNIT_POS_PLANE == 0 {
            parts[g * PLANES + plane] = top;
        }
    }
    sync_cube();
    #[unroll]
    for g in 0..group {
        let mut top = f32::new(LOWEST);
        for other in 0..planes {
            top = larger(top, parts[g * PLANES + other]);
        }
        tops[g] = top;
    }
    sync_cube();
    #[unroll]
    for g in 0..group {
        let mut sum = 0.0f32;
        let mut i = UNIT_POS as usize;
        while i < count {
            let slot = select(i < sight.sinks, i, i + gap);
            sum += (logits[base + g * stride + slot] - tops[g]).exp();
            i += units;
        }
        sum = plane_sum(sum);
        if UNIT_POS_PLANE == 0 {
            parts[g * PLANES + plane] = sum;
        }
    }
    sync_cube();
    #[unroll]
    for g in 0..group {
        let mut sum = 0.0f32;
        for other in 0..planes {
            sum += parts[g * PLANES + other];
        }
        sums[g] = tops[g] + sum.ln();
    }
    sync_cube();
    sums
}

/// Retrieves a set: writes its tokens, from `to` on, and returns how many there are and the most attention that a
/// query does not give to what is surely attended to until the block ends.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn retrieve(
    logits: &[f32],
    keys: &mut [u32],
    table: &mut [i32],
    sums: &Array<f32>,
    pair: usize,
    stride: usize,
    sight: &Sight,
    to: usize,
    top: usize,
    dilated: usize,
    radius: usize,
    block: usize,
    hidden: u32,
    #[comptime] blueprint: Blueprint,
) -> (usize, f32) {
    let group = blueprint.group.comptime();
    let units = blueprint.units.comptime();
    let unit = UNIT_POS as usize;
    let (start, local) = (sight.start, sight.local);
    let base = pair * stride;
    let from = pair * group * stride;
    let mut i = start + unit;
    while i < local {
        let mut best = f32::new(LOWEST);
        #[unroll]
        for g in 0..group {
            best = larger(best, logits[from + g * stride + i] - sums[g]);
        }
        if comptime!(group > 1 && blueprint.reduction == ScoreReduction::Sum) {
            let mut sum = 0.0f32;
            #[unroll]
            for g in 0..group {
                sum += (logits[from + g * stride + i] - sums[g] - best).exp();
            }
            best += sum.ln();
        }
        keys[base + i] = high_of(best);
        i += units;
    }
    settle(blueprint.fenced);
    let fewer = max(min(dilated, top), 1usize);
    let (highest, finest) =
        edges(&*keys, base, start, local, u32::cast_from(top), u32::cast_from(fewer), units);

    // Units have neighbouring slots, so that they know their rank among equals where not all of them go in.
    let mut parts = Shared::<[u32]>::new_slice(PLANES);
    let segment = (local - start).div_ceil(units);
    let first = min(start + unit * segment, local);
    let last = min(first + segment, local);
    let room = u32::cast_from(top) - highest.above;
    let room_best = u32::cast_from(fewer) - finest.above;
    let mut rank = 0u32;
    let mut rank_best = 0u32;
    if highest.equal > room || finest.equal > room_best {
        let mut equal = 0u32;
        let mut equal_best = 0u32;
        for i in first..last {
            equal += select(keys[base + i] == highest.key, 1u32, 0u32);
            equal_best += select(keys[base + i] == finest.key, 1u32, 0u32);
        }
        let (before, _) = exclusive(equal, &mut parts);
        let (before_best, _) = exclusive(equal_best, &mut parts);
        rank = before;
        rank_best = before_best;
    }
    for i in first..last {
        let key = keys[base + i];
        let mut mark = 0u32;
        if key > highest.key || (key == highest.key && rank < room) {
            mark |= HIGHEST;
        }
        if key > finest.key || (key == finest.key && rank_best < room_best) {
            mark |= BEST;
        }
        rank += select(key == highest.key, 1u32, 0u32);
        rank_best += select(key == finest.key, 1u32, 0u32);
        keys[base + i] = select(dilated == 0, mark & HIGHEST, mark);
    }
    settle(blueprint.fenced);

    // Neighbours of the best may be locals, which go out of the locals' place with time.
    let reach = min(local + radius, sight.length);
    let segment = (reach - start).div_ceil(units);
    let first = min(start + unit * segment, reach);
    let last = min(first + segment, reach);
    let mut own = 0u32;
    for i in first..last {
        own += select(is_chosen(&*keys, base, i, start, local, radius), 1u32, 0u32);
    }
    let (before, count) = exclusive(own, &mut parts);
    let mut next = before as usize;
    if own > 0 {
        for i in first..last {
            if is_chosen(&*keys, base, i, start, local, radius) {
                if next < comptime!(blueprint.width) {
                    table[to + next] = i32::cast_from(i + sight.freed);
                }
                next += 1;
            }
        }
    }

    let mut dropped = 0.0f32;
    if comptime!(blueprint.certified) {
        let left = block - 1 - (sight.tokens - min(sight.tokens, 1usize)) % block;
        let ahead = first_in_sight(hidden, sight.tokens + left);
        let later = ahead - min(ahead, sight.freed);
        let stays = min(local + left, sight.length);
        let mut masses = Shared::<[f32]>::new_slice(comptime!(PLANES * group));
        let plane = (UNIT_POS / PLANE_DIM) as usize;
        #[unroll]
        for g in 0..group {
            let mut mass = 0.0f32;
            let mut i = start + unit;
            while i < sight.length {
                let mut kept = i >= stays;
                if !kept && i < reach {
                    kept = is_chosen(&*keys, base, i, start, local, radius);
                }
                if !kept || i < later {
                    mass += (logits[from + g * stride + i] - sums[g]).exp();
                }
                i += units;
            }
            mass = plane_sum(mass);
            if UNIT_POS_PLANE == 0 {
                masses[g * PLANES + plane] = mass;
            }
        }
        sync_cube();
        #[unroll]
        for g in 0..group {
            let mut mass = 0.0f32;
            for other in 0..(CUBE_DIM / PLANE_DIM) as usize {
                mass += masses[g * PLANES + other];
            }
            dropped = max(dropped, mass);
        }
    }
    (min(count as usize, comptime!(blueprint.width)), dropped)
}

/// Whether a slot is among the highest, or a neighbour of the best.
#[cube]
fn is_chosen(
    keys: &[u32],
    base: usize,
    slot: usize,
    start: usize,
    local: usize,
    radius: usize,
) -> bool {
    let mut marks = 0u32;
    if slot < local {
        marks = keys[base + slot] & HIGHEST;
    }
    let first = max(slot - min(slot, radius), start);
    let end = min(slot + radius + 1, local);
    let mut i = first;
    while i < end {
        marks |= keys[base + i] & BEST;
        i += 1;
    }
    marks > 0
}

/// Writes what the step reads of its set, and counts.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn conclude(
    table: &mut [i32],
    own: usize,
    sight: &Sight,
    decided: i32,
    set: usize,
    distance: f32,
    #[comptime] sets: usize,
    #[comptime] width: usize,
) {
    let mut first = 0usize;
    let mut read = 0usize;
    let mut local = sight.start;
    if decided != i32::new(ALL as i64) {
        local = sight.local;
        let fields = own + FIELDS + set * SET_FIELDS;
        let count = table[fields + COUNT] as usize;
        first = comptime!(FIELDS + sets * SET_FIELDS) + set * width;
        let mut skipped = 0usize;
        let start_token = i32::cast_from(sight.start + sight.freed);
        let local_token = i32::cast_from(sight.local + sight.freed);
        let mut more = count > 0;
        while more {
            more = false;
            if table[own + first + skipped] < start_token {
                skipped += 1;
                more = skipped < count;
            }
        }
        let mut end = count;
        more = end > skipped;
        while more {
            more = false;
            if table[own + first + end - 1] >= local_token {
                end -= 1;
                more = end > skipped;
            }
        }
        first += skipped;
        read = end - skipped;
        table[own + OWN_KEY_NORM] = table[fields + KEY_NORM];
        table[own + OWN_DROPPED] = table[fields + DROPPED];
    }
    table[own + DECIDED] = decided;
    table[own + DISTANCE] = i32::reinterpret(distance);
    table[own + FIRST] = i32::cast_from(first);
    table[own + READ] = i32::cast_from(read);
    table[own + LOCAL] = i32::cast_from(local);
    table[own + FREED] = i32::cast_from(sight.freed);
    table[own + STEPS] += 1i32;
    if decided == i32::new(RETRIEVES as i64) {
        table[own + RETRIEVED] += 1i32;
    }
    let tokens = table[own + TOKENS] + i32::cast_from(sight.sinks + read + sight.length - local);
    table[own + TOKENS] = tokens & comptime!((1i32 << TOKEN_BITS) - 1);
    table[own + TOKENS_HIGH] += tokens >> comptime!(TOKEN_BITS as i32);
}

/// Waits until what the cube wrote to memory is seen by all of it.
#[cube]
pub(super) fn settle(#[comptime] fenced: bool) {
    if fenced {
        sync_storage();
    } else {
        sync_cube();
    }
}
