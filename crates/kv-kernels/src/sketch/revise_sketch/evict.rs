//! Evictions in bulk: those of the lowest scores go into the sketch, and the last slots take their
//! places.

use cubecl::prelude::*;

use super::accumulate::Blueprint;
use super::choose::{VICTIMS, choose, source_of};
use super::search::raise_tops;
use crate::components::barrier::sync_memory;
use crate::components::sentinels::NO_INDEX;
use crate::sketch::count_sketch::hash::kernel::{hash_of, key_sign, sign_of};
use crate::sketch::count_sketch::{HEAD_FIELDS, SketchConfig};

/// Rows or entries that a unit reads before it waits for the first: more would take registers from
/// a cube beside.
const READS: usize = 2;

/// Evicts from a range of `held` slots until what it keeps is left, none of tokens from `bound` on.
/// Returns its length then, and how many went into the sketch. Victims are chosen first, by a plane
/// alone; then what they hold is read side by side.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn evict<F: Float>(
    sketch_keys: &mut [Vector<f32, Const<4>>],
    sketch_values: &mut [Vector<f32, Const<4>>],
    keys: &mut [Vector<F, Const<4>>],
    values: &mut [Vector<F, Const<4>>],
    positions: &mut [i32],
    slot_scores: &mut [f32],
    token_scores: &mut [f32],
    tops: &mut [f32],
    tops_at: &mut [i32],
    heads: &[i32],
    hashes: &[i32],
    kv_head: usize,
    start: usize,
    held: i32,
    bound: i32,
    parts: usize,
    part: usize,
    #[comptime] columns: usize,
    #[comptime] fenced: bool,
    #[comptime] blueprint: Blueprint,
    #[comptime] config: SketchConfig,
) -> (i32, i32) {
    let units = blueprint.units.comptime();
    let unit = UNIT_POS as usize;
    let first_entry = heads[kv_head * HEAD_FIELDS] as usize;
    let entries = heads[kv_head * HEAD_FIELDS + 1] as u32;
    let first_token = heads[kv_head * HEAD_FIELDS + 2] as usize;
    let limit = heads[kv_head * HEAD_FIELDS + 4];
    let mut places = Shared::<[i32]>::new_slice(VICTIMS);
    let mut tokens = Shared::<[i32]>::new_slice(VICTIMS);
    let mut scores = Shared::<[f32]>::new_slice(VICTIMS);
    let mut sources = Shared::<[i32]>::new_slice(VICTIMS);
    let mut targets = Shared::<[i32]>::new_slice(VICTIMS);
    let mut replacements = Shared::<[i32]>::new_slice(VICTIMS);
    // Slots that are left, and how many victims the last turn had.
    let mut state = Shared::<[i32]>::new_slice(2usize);

    let mut length = held;
    let mut gone = 0i32;
    while length > limit {
        let before = length;
        if UNIT_POS < PLANE_DIM {
            choose(
                positions,
                slot_scores,
                &mut places,
                &mut tokens,
                &mut scores,
                &mut state,
                start,
                length,
                limit,
                bound,
            );
        }
        // All see what was chosen, and what has moved by that.
        sync_memory(fenced);
        length = state[0];
        let count = state[1] as usize;
        if unit < count {
            let place = places[unit];
            sources[unit] = source_of(&places, place, unit, before);
            replacements[unit] = source_of(&places, before - 1i32 - unit as i32, unit, before);
            // Slots behind the rest keep nothing, and the last that comes into a slot stays.
            let mut target = select(place < length, place, i32::new(NO_INDEX as i64));
            for later in unit + 1..count {
                if places[later] == place {
                    target = i32::new(NO_INDEX as i64);
                }
            }
            targets[unit] = target;
            token_scores[first_token + tokens[unit] as usize] = scores[unit];
        }
        sync_cube();
        // Teams of units with a vector of a row each, of keys before values: they share buckets,
        // then rows.
        let teams = comptime!(units / (2 * columns));
        let team = unit / comptime!(2 * columns);
        // Units behind the last whole team have nothing to do.
        let team = select(team < teams, team, comptime!(VICTIMS.max(config.buckets)).runtime());
        let member = unit % comptime!(2 * columns);
        let is_key = member < columns;
        let column = select(is_key, member, member - columns);
        let at = Rows { kv_head, start, first_entry, entries, column, team };
        if is_key {
            absorb(
                sketch_keys,
                &*keys,
                hashes,
                &at,
                &sources,
                &tokens,
                count,
                columns,
                teams,
                true,
                config,
            );
        } else {
            absorb(
                sketch_values,
                &*values,
                hashes,
                &at,
                &sources,
                &tokens,
                count,
                columns,
                teams,
                false,
                config,
            );
        }
        // All have read what victims hold.
        sync_memory(fenced);
        if is_key {
            replace(keys, &at, &replacements, &targets, count, columns, teams);
        } else {
            replace(values, &at, &replacements, &targets, count, columns, teams);
        }
        raise_tops(tops, tops_at, &tokens, &scores, count, kv_head * parts, parts, part, blueprint);
        gone += count as i32;
        sync_memory(fenced);
    }
    (length, gone)
}

/// A range's rows, of which a unit has a column, and a team every so many.
#[derive(CubeType)]
struct Rows {
    kv_head: usize,
    start: usize,
    first_entry: usize,
    entries: u32,
    column: usize,
    team: usize,
}

/// Adds what victims hold to their entries, one after another: teams take buckets, which have no
/// entry in common.
#[cube]
#[allow(clippy::too_many_arguments)]
fn absorb<F: Float>(
    sketch: &mut [Vector<f32, Const<4>>],
    slots: &[Vector<F, Const<4>>],
    hashes: &[i32],
    at: &Rows,
    sources: &Shared<[i32]>,
    tokens: &Shared<[i32]>,
    count: usize,
    #[comptime] columns: usize,
    #[comptime] teams: usize,
    #[comptime] is_key: bool,
    #[comptime] config: SketchConfig,
) {
    for round in 0..comptime!(config.buckets.div_ceil(teams)) {
        let bucket = round * teams + at.team;
        let count = select(bucket < config.buckets, count, 0usize);
        let first_entry = at.first_entry + bucket * at.entries as usize;
        let mut first = 0usize;
        while first < count {
            let mut added = Array::<Vector<F, Const<4>>>::new(READS);
            let mut rows = Array::<usize>::new(READS);
            let mut signs = Array::<f32>::new(READS);
            let mut held = Array::<Vector<f32, Const<4>>>::new(READS);
            #[unroll]
            for a in 0..READS {
                let victim = min(first + a, count - 1);
                let slot = at.start + sources[victim] as usize;
                added[a] = slots[slot * columns + at.column];
                let token = tokens[victim] as u32;
                let place = hash_of(hashes, at.kv_head, bucket, token, at.entries, config);
                signs[a] = if comptime!(is_key) { key_sign(place, config) } else { sign_of(place) };
                rows[a] = (first_entry + (place / 2u32) as usize) * columns + at.column;
                held[a] = sketch[rows[a]];
            }
            #[unroll]
            for a in 0..READS {
                let mut sum = held[a];
                // Where an earlier one of these has the same entry, it has added to it since.
                #[unroll]
                for earlier in 0..a {
                    if rows[earlier] == rows[a] {
                        sum = held[earlier];
                    }
                }
                sum += Vector::cast_from(added[a]) * Vector::new(signs[a]);
                held[a] = sum;
                if first + a < count {
                    sketch[rows[a]] = sum;
                }
            }
            first += READS;
        }
    }
}

/// Puts the rows that were last into the places of victims: nothing that is read is written to.
#[cube]
fn replace<F: Float>(
    slots: &mut [Vector<F, Const<4>>],
    at: &Rows,
    replacements: &Shared<[i32]>,
    targets: &Shared<[i32]>,
    count: usize,
    #[comptime] columns: usize,
    #[comptime] teams: usize,
) {
    let turn = comptime!(READS * teams);
    for round in 0..count.div_ceil(turn) {
        let first = round * turn + at.team;
        let mut rows = Array::<Vector<F, Const<4>>>::new(READS);
        #[unroll]
        for a in 0..READS {
            let victim = min(first + a * teams, count - 1);
            let from = at.start + replacements[victim] as usize;
            rows[a] = slots[from * columns + at.column];
        }
        #[unroll]
        for a in 0..READS {
            let victim = first + a * teams;
            let target = targets[min(victim, count - 1)];
            if victim < count && target != NO_INDEX {
                slots[(at.start + target as usize) * columns + at.column] = rows[a];
            }
        }
    }
}
