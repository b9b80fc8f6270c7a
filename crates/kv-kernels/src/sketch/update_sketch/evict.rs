//! Bulk evictions: the slots of the lowest scores go into the sketch, and the range's last slots
//! move into their places.

use cubecl::prelude::*;

use super::blueprint::UpdateBlueprint;
use super::choose::{ShrinkingRange, choose, source_of};
use super::kernel_args::{ExactTokens, TokenScores};
use super::search::raise_tops;
use super::victims::{VICTIMS, Victims};
use crate::components::barrier::sync_memory;
use crate::components::sentinels::NO_INDEX;
use crate::sketch::count_sketch::HEAD_FIELDS;
use crate::sketch::count_sketch::hash::kernel::{hash_of, key_sign, sign_of};
use crate::sketch::count_sketch::kernel_args::Sketch;

/// Rows or entries that a unit reads before it waits for the first. More would take registers that
/// a second cube needs.
const READS: usize = 2;

/// Evicts from a range until only the slots that it keeps are left. Returns the range's new length,
/// and how many tokens went into the sketch. One plane chooses victims first; then all units read
/// their rows side by side.
#[cube]
pub(super) fn evict<F: Float>(
    sketch: &mut Sketch,
    exact: &mut ExactTokens<F>,
    tokens: &mut TokenScores,
    kv_head: usize,
    range: &ShrinkingRange,
    #[comptime] blueprint: UpdateBlueprint,
) -> (i32, i32) {
    let UpdateBlueprint { columns, fenced, scores: accumulation, sketch: config, .. } = blueprint;
    let unit = UNIT_POS as usize;
    let heads = &sketch.heads;
    let first_entry = heads[kv_head * HEAD_FIELDS] as usize;
    let entries = heads[kv_head * HEAD_FIELDS + 1] as u32;
    let first_token = heads[kv_head * HEAD_FIELDS + 2] as usize;
    let limit = range.limit;
    let mut victims = Victims::room();

    let start = range.start;
    let mut length = range.held;
    let mut gone = 0i32;
    while length > limit {
        let before = length;
        if UNIT_POS < PLANE_DIM {
            let left = ShrinkingRange { start, held: length, limit, bound: range.bound };
            choose(&mut exact.slots, &mut victims, &left);
        }
        // All units see the chosen victims, and the positions and scores that moved.
        sync_memory(fenced);
        length = victims.state[0];
        let count = victims.state[1] as usize;
        if unit < count {
            let place = victims.places[unit];
            victims.sources[unit] = source_of(&victims.places, place, unit, before);
            victims.replacements[unit] =
                source_of(&victims.places, before - 1i32 - unit as i32, unit, before);
            // Places after the new end keep nothing. Of several rows that came into one place, the
            // last stays.
            let mut target = select(place < length, place, i32::new(NO_INDEX as i64));
            for later in unit + 1..count {
                if victims.places[later] == place {
                    target = i32::new(NO_INDEX as i64);
                }
            }
            victims.targets[unit] = target;
            tokens.scores[first_token + victims.tokens[unit] as usize] = victims.scores[unit];
        }
        sync_cube();
        // Teams of units have a row each, a vector a unit, keys before values. They divide buckets
        // first, then rows.
        let teams = comptime!(blueprint.teams());
        let team = unit / comptime!(2 * columns);
        // Units after the last whole team have no work.
        let team = select(team < teams, team, comptime!(VICTIMS.max(config.buckets)).runtime());
        let member = unit % comptime!(2 * columns);
        let is_key = member < columns;
        let column = select(is_key, member, member - columns);
        let at = Rows { kv_head, start, first_entry, entries, column, team, count };
        if is_key {
            let added = &exact.pool.keys;
            absorb(&mut sketch.keys, added, &sketch.hashes, &at, &victims, Half::Keys, blueprint);
        } else {
            let added = &exact.pool.values;
            absorb(
                &mut sketch.values,
                added,
                &sketch.hashes,
                &at,
                &victims,
                Half::Values,
                blueprint,
            );
        }
        // All units have read the victims' rows.
        sync_memory(fenced);
        if is_key {
            replace(&mut exact.pool.keys, &at, &victims, columns, teams);
        } else {
            replace(&mut exact.pool.values, &at, &victims, columns, teams);
        }
        raise_tops(tokens, &victims, count, kv_head, accumulation);
        gone += count as i32;
        sync_memory(fenced);
    }
    (length, gone)
}

/// The rows of a range, and which of them and which column a unit takes.
#[derive(CubeType)]
struct Rows {
    kv_head: usize,
    start: usize,
    first_entry: usize,
    entries: u32,
    column: usize,
    team: usize,
    /// Victims of this turn.
    count: usize,
}

/// The half of a row: key or value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Half {
    Keys,
    Values,
}

/// Adds the victims' rows to their entries, one after another. Each team takes buckets of its own,
/// which have no entry in common.
#[cube]
fn absorb<F: Float>(
    entries: &mut [Vector<f32, Const<4>>],
    slots: &[Vector<F, Const<4>>],
    hashes: &[i32],
    at: &Rows,
    victims: &Victims,
    #[comptime] half: Half,
    #[comptime] blueprint: UpdateBlueprint,
) {
    let (columns, config) = comptime!((blueprint.columns, blueprint.sketch));
    let teams = comptime!(blueprint.teams());
    for round in 0..comptime!(config.buckets.div_ceil(teams)) {
        let bucket = round * teams + at.team;
        let count = select(bucket < config.buckets, at.count, 0usize);
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
                let slot = at.start + victims.sources[victim] as usize;
                added[a] = slots[slot * columns + at.column];
                let token = victims.tokens[victim] as u32;
                let place = hash_of(hashes, at.kv_head, bucket, token, at.entries, config);
                signs[a] = if comptime!(half == Half::Keys) {
                    key_sign(place, config)
                } else {
                    sign_of(place)
                };
                rows[a] = (first_entry + (place / 2u32) as usize) * columns + at.column;
                held[a] = entries[rows[a]];
            }
            #[unroll]
            for a in 0..READS {
                let mut sum = held[a];
                // An earlier victim of this round may have added to the same entry.
                #[unroll]
                for earlier in 0..a {
                    if rows[earlier] == rows[a] {
                        sum = held[earlier];
                    }
                }
                sum += Vector::cast_from(added[a]) * Vector::new(signs[a]);
                held[a] = sum;
                if first + a < count {
                    entries[rows[a]] = sum;
                }
            }
            first += READS;
        }
    }
}

/// Moves the last rows into the victims' places. No row that is read is written.
#[cube]
fn replace<F: Float>(
    slots: &mut [Vector<F, Const<4>>],
    at: &Rows,
    victims: &Victims,
    #[comptime] columns: usize,
    #[comptime] teams: usize,
) {
    let count = at.count;
    let turn = comptime!(READS * teams);
    for round in 0..count.div_ceil(turn) {
        let first = round * turn + at.team;
        let mut rows = Array::<Vector<F, Const<4>>>::new(READS);
        #[unroll]
        for a in 0..READS {
            let victim = min(first + a * teams, count - 1);
            let from = at.start + victims.replacements[victim] as usize;
            rows[a] = slots[from * columns + at.column];
        }
        #[unroll]
        for a in 0..READS {
            let victim = first + a * teams;
            let target = victims.targets[min(victim, count - 1)];
            if victim < count && target != NO_INDEX {
                slots[(at.start + target as usize) * columns + at.column] = rows[a];
            }
        }
    }
}
