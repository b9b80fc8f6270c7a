//! Evictions in bulk: those of the lowest scores go into the sketch, and the last slots take their places.

use cubecl::prelude::*;

use super::accumulate::Blueprint;
use super::search::lowest_of;
use crate::barrier::sync_memory;
use crate::count_sketch::hash::kernel::{place_of, sign_of};
use crate::count_sketch::{HEAD_FIELDS, SketchConfig};
use crate::evicting_attention::weigh::NOWHERE;

/// Victims that are chosen before the first of them moves: at most as many as a cube has units.
const VICTIMS: usize = 32;
/// Slots that a unit of the plane that chooses reads before it waits for the first.
const SLOTS: usize = 8;
/// Rows or entries that a unit reads before it waits for the first: more would take registers from a cube beside.
const READS: usize = 2;

/// Evicts from a range of `held` slots until what it keeps is left, none of tokens from `bound` on. Returns its length
/// then, and how many went into the sketch. Victims are chosen first, by a plane alone; then what they hold is read side
/// by side.
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
    pair: usize,
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
    let first_entry = heads[pair * HEAD_FIELDS] as usize;
    let entries = heads[pair * HEAD_FIELDS + 1] as u32;
    let first_token = heads[pair * HEAD_FIELDS + 2] as usize;
    let limit = heads[pair * HEAD_FIELDS + 4];
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
            let mut target = select(place < length, place, i32::new(NOWHERE as i64));
            for later in unit + 1..count {
                if places[later] == place {
                    target = i32::new(NOWHERE as i64);
                }
            }
            targets[unit] = target;
            token_scores[first_token + tokens[unit] as usize] = scores[unit];
        }
        sync_cube();
        // Teams of units with a vector of a row each, of keys before values: they share buckets, then rows.
        let teams = comptime!(units / (2 * columns));
        let team = unit / comptime!(2 * columns);
        // Units behind the last whole team have nothing to do.
        let team = select(team < teams, team, comptime!(VICTIMS.max(config.buckets)).runtime());
        let member = unit % comptime!(2 * columns);
        let is_key = member < columns;
        let column = select(is_key, member, member - columns);
        let at = Rows { pair, start, first_entry, entries, column, team };
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
        raise_tops(tops, tops_at, &tokens, &scores, count, pair * parts, parts, part, blueprint);
        gone += count as i32;
        sync_memory(fenced);
    }
    (length, gone)
}

/// Chooses victims, one after another: positions and scores move at once, keys and values when all are chosen. Left to
/// one plane, whose units need no barrier: each reads and writes every so many of the slots, and only these.
#[cube]
#[allow(clippy::too_many_arguments)]
fn choose(
    positions: &mut [i32],
    slot_scores: &mut [f32],
    places: &mut Shared<[i32]>,
    tokens: &mut Shared<[i32]>,
    scores: &mut Shared<[f32]>,
    state: &mut Shared<[i32]>,
    start: usize,
    held: i32,
    limit: i32,
    bound: i32,
) {
    let (unit, units) = (UNIT_POS_PLANE as usize, PLANE_DIM as usize);
    let mut length = held;
    let mut count = 0usize;
    let mut among = true;
    let mut own =
        lowest_of(&*slot_scores, &*positions, start, length as usize, bound, unit, units, SLOTS);
    while among && length > limit && count < VICTIMS {
        // What takes the victim's place is read by whom it belongs to.
        let last = length - 1i32;
        let keeper = last as u32 % PLANE_DIM;
        let from = start + last as usize;
        let last_token = plane_shuffle(positions[from], keeper);
        let last_score = plane_shuffle(slot_scores[from], keeper);
        let least = plane_min(own.value);
        let victim = plane_min(select(own.value == least, own.at, i32::new(NOWHERE as i64)));
        among = victim != NOWHERE;
        if among {
            let holds = victim as usize % units == unit;
            if holds {
                let to = start + victim as usize;
                places[count] = victim;
                tokens[count] = positions[to];
                scores[count] = least;
                positions[to] = last_token;
                slot_scores[to] = last_score;
            }
            length = last;
            count += 1;
            // By all, though few have lost anything: a plane's units wait for each other anyway.
            own.set(lowest_of(
                &*slot_scores,
                &*positions,
                start,
                length as usize,
                bound,
                unit,
                units,
                SLOTS,
            ));
        }
    }
    if !among {
        // All are recent, as those of a sequence that has ended and stays where it is: the last go, and nothing
        // remembers them.
        length = limit;
    }
    if unit == 0 {
        state[0] = length;
        state[1] = count as i32;
    }
}

/// Where a slot's row stood when a range of `held` slots began to move, before its `moves`-th move: each brought the
/// last of those left to one of `places`.
#[cube]
fn source_of(places: &Shared<[i32]>, slot: i32, moves: usize, held: i32) -> i32 {
    let mut source = slot;
    for back in 0..moves {
        let earlier = moves - 1 - back;
        if places[earlier] == source {
            source = held - 1i32 - earlier as i32;
        }
    }
    source
}

/// A range's rows, of which a unit has a column, and a team every so many.
#[derive(CubeType)]
struct Rows {
    pair: usize,
    start: usize,
    first_entry: usize,
    entries: u32,
    column: usize,
    team: usize,
}

/// Adds what victims hold to their entries, one after another: teams take buckets, which have no entry in common.
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
                let place = place_of(hashes, at.pair, bucket, token, at.entries, config);
                let mut sign = 1.0f32;
                if comptime!(!is_key || config.signed_keys) {
                    sign = sign_of(place);
                }
                signs[a] = sign;
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
            if victim < count && target != NOWHERE {
                slots[(at.start + target as usize) * columns + at.column] = rows[a];
            }
        }
    }
}

/// Takes tokens that are new to a sketch into the highest scores, negated, of their parts.
#[cube]
#[allow(clippy::too_many_arguments)]
fn raise_tops(
    tops: &mut [f32],
    tops_at: &mut [i32],
    tokens: &Shared<[i32]>,
    scores: &Shared<[f32]>,
    count: usize,
    first_part: usize,
    parts: usize,
    part: usize,
    #[comptime] blueprint: Blueprint,
) {
    let mut of = UNIT_POS as usize;
    while of < parts {
        let mut top = tops[first_part + of];
        let mut top_at = tops_at[first_part + of];
        for victim in 0..count {
            let token = tokens[victim];
            let score = -scores[victim];
            if token as usize / part == of
                && (top_at == NOWHERE || score < top || (score == top && token < top_at))
            {
                top = score;
                top_at = token;
            }
        }
        tops[first_part + of] = top;
        tops_at[first_part + of] = top_at;
        of += comptime!(blueprint.units);
    }
}

/// What a key is multiplied with in an entry.
#[cube]
pub(super) fn key_sign(place: u32, #[comptime] config: SketchConfig) -> f32 {
    let mut sign = 1.0f32;
    if comptime!(config.signed_keys) {
        sign = sign_of(place);
    }
    sign
}
