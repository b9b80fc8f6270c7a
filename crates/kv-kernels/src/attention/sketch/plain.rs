//! The portable kernel of attention over slots and sketched tokens. A team of units shares a row,
//! and each unit of it holds some columns. It serves f32, devices without matrix instructions, and
//! groups of one query head.

use cubecl::prelude::*;

use super::kernel_args::{SketchOutputs, SketchedTokens, SplitRanges};
use crate::attention::decode::kernel_args::Queries;
use crate::attention::decode::subgroup_softmax::{
    TeamSums, ThreadGroup, Turn, Weighing, gather_sums, take_rows,
};
use crate::components::pool::Pool;
use crate::components::sentinels::{LOWEST_LOGIT, NO_ENTRY};
use crate::components::softmax::{divisor, larger};
use crate::sketch::count_sketch::hash::kernel::{hash_of, sign_of};
use crate::sketch::count_sketch::query::median;
use crate::sketch::count_sketch::{HEAD_FIELDS, SketchConfig};

/// Elements of a vector of an entry.
const ENTRY: usize = 4;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    pub(super) shape: ThreadGroup,
    /// Units of a cube.
    pub(super) units: usize,
    /// Units that a plane has at least, and that may exchange numbers.
    pub(super) plane: usize,
    /// Query heads whose rows are reduced in shared memory at a time: all of the group, or one.
    pub(super) joined: usize,
    /// Elements of a vector.
    pub(super) lanes: usize,
    /// Whether several cubes share a range, so that partial sums are written.
    pub(super) split: bool,
    /// Entries of a range that shared memory has room for; 0 where they stay in global memory.
    pub(super) staged: usize,
    pub(super) sketch: SketchConfig,
}

/// Attends by one cube for each part of a range. Rows of `D` elements are read in vectors of `N`,
/// and entries in vectors of 4.
#[cube(launch_unchecked)]
#[allow(clippy::collapsible_if, reason = "the outer one decides what code there is")]
pub(super) fn sketch_attention_kernel<F: Float, N: Size>(
    queries: &Queries<Vector<F, N>>,
    pool: &Pool<Vector<F, N>, Vector<F, N>>,
    ranges: &SplitRanges,
    tokens: &SketchedTokens,
    outputs: &mut SketchOutputs<Vector<F, N>, Vector<f32, N>>,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let shape = blueprint.shape.comptime();
    let ThreadGroup { group, columns, team, ahead } = shape;
    let own = shape.own().comptime();
    let units = blueprint.units.comptime();
    let buckets = blueprint.sketch.buckets.comptime();
    let teams = (units / team).comptime();
    let weighing = comptime!(Weighing { weighted: false, numerators: false, logits: true });
    // Vectors of an entry in one vector of a row.
    let pieces = (blueprint.lanes / ENTRY).comptime();

    let cube = CUBE_POS;
    let splits = ranges.splits;
    if cube >= ranges.total_kv_heads * splits {
        terminate!();
    }
    let kv_head = cube / splits;
    let split = cube % splits;
    let unit = UNIT_POS as usize;
    let lane = unit % team;
    let own_team = unit / team;

    let mut q = Array::<Vector<f32, N>>::new(comptime!(group * own));
    let mut running = TeamSums::<N>::of_nothing(shape);
    #[unroll]
    for g in 0..group {
        #[unroll]
        for c in 0..own {
            let column = lane + c * team;
            q[g * own + c] = Vector::new(0.0f32);
            if column < columns {
                q[g * own + c] =
                    Vector::cast_from(queries.rows[(kv_head * group + g) * columns + column])
                        * Vector::new(queries.scale);
            }
        }
    }

    // First, the exact slots.
    let start = ranges.offsets[kv_head] as usize;
    let length = ranges.lengths[kv_head] as usize;
    let share = length.div_ceil(splits);
    let first = min(split * share, length);
    let end = min(first + share, length);
    let none = u32::MAX as usize;
    // All teams run equally many rounds, since a plane's teams exchange numbers in each.
    let rounds = (end - first).div_ceil(comptime!(teams * ahead));
    for round in 0..rounds {
        let mut own_rows = Turn::<F, N>::new(none, shape);
        #[unroll]
        for a in 0..ahead {
            let i = first + (round * ahead + a) * teams + own_team;
            let slot = start + min(i, end - 1);
            own_rows.at[a] = select(i < end, slot, none);
            #[unroll]
            for c in 0..own {
                let column = min(lane + c * team, columns - 1);
                own_rows.keys[a * own + c] = pool.keys[slot * columns + column];
                own_rows.values[a * own + c] = pool.values[slot * columns + column];
            }
        }
        take_rows::<F, N>(
            &q,
            &own_rows,
            &mut running,
            &mut outputs.slot_logits,
            lane,
            weighing,
            shape,
        );
    }

    // Then, the tokens in the sketch.
    let (sketch, heads) = (&tokens.sketch, &tokens.sketch.heads);
    let head = kv_head * HEAD_FIELDS;
    let first_entry = heads[head] as usize;
    let entries = heads[head + 1] as usize;
    let first_token = heads[head + 2] as usize;
    let last = min(tokens.newest[kv_head / tokens.kv_heads] + 1i32, heads[head + 3]);
    let mut seen = max(last, 0i32) as usize;
    if entries == 0 {
        seen = 0usize.runtime();
    }
    let share = seen.div_ceil(splits);
    let first = min(split * share, seen);
    let end = min(first + share, seen);

    let room = comptime!(if blueprint.staged > 0 { blueprint.staged * columns } else { 1 });
    let mut staged_keys = Shared::<[Vector<F, N>]>::new_slice(room);
    let mut staged_values = Shared::<[Vector<F, N>]>::new_slice(room);
    if comptime!(blueprint.staged > 0) {
        if first < end {
            let count = entries * comptime!(buckets * columns);
            let mut i = unit;
            while i < count {
                let from = first_entry * comptime!(columns * pieces) + i * pieces;
                staged_keys[i] = joined::<F, N>(&sketch.keys, from, pieces);
                staged_values[i] = joined::<F, N>(&sketch.values, from, pieces);
                i += units;
            }
        }
    }
    // The places of a turn's tokens, which each unit hashes for one token: the entry and the sign
    // in every bucket. The first bucket also says whether the token is in the sketch.
    let mut entry_hashes = Shared::<[u32]>::new_slice(comptime!(units * buckets));
    let turns = (end - first).div_ceil(units);
    for turn in 0..turns {
        let base = first + turn * units;
        let token = base + unit;
        let mut is_one = false;
        if token < end {
            is_one = tokens.scores[first_token + token] >= 0.0f32;
        }
        #[unroll]
        for bucket in 0..buckets {
            let mut entry_hash = NO_ENTRY.runtime();
            if is_one {
                entry_hash = hash_of(
                    &sketch.hashes,
                    kv_head,
                    bucket.runtime(),
                    token as u32,
                    entries as u32,
                    blueprint.sketch,
                );
            }
            entry_hashes[unit * buckets + bucket] = entry_hash;
        }
        sync_cube();
        let here = min(end - base, units);
        let rounds = here.div_ceil(comptime!(teams * ahead));
        for round in 0..rounds {
            let mut own_rows = Turn::<F, N>::new(none, shape);
            #[unroll]
            for a in 0..ahead {
                let i = (round * ahead + a) * teams + own_team;
                let listed = min(i, units - 1);
                let mut rows = Array::<usize>::new(buckets);
                let mut signs = Array::<f32>::new(buckets);
                let absent = entry_hashes[listed * buckets] == NO_ENTRY;
                #[unroll]
                for bucket in 0..buckets {
                    let entry_hash = entry_hashes[listed * buckets + bucket];
                    // A token that is not in the sketch reads the first entry.
                    let within = select(absent, 0usize, (entry_hash / 2u32) as usize);
                    rows[bucket] = (bucket * entries + within) * columns;
                    signs[bucket] = sign_of(entry_hash);
                }
                own_rows.at[a] = select(absent || i >= here, none, first_token + base + listed);
                #[unroll]
                for c in 0..own {
                    let column = min(lane + c * team, columns - 1);
                    let mut key_parts = Array::<Vector<F, N>>::new(buckets);
                    let mut value_parts = Array::<Vector<F, N>>::new(buckets);
                    #[unroll]
                    for bucket in 0..buckets {
                        let row = rows[bucket] + column;
                        let sign = Vector::<F, N>::new(F::cast_from(signs[bucket]));
                        if comptime!(blueprint.staged > 0) {
                            key_parts[bucket] = staged_keys[row];
                            value_parts[bucket] = staged_values[row] * sign;
                        } else {
                            let from = first_entry * comptime!(columns * pieces) + row * pieces;
                            key_parts[bucket] = joined::<F, N>(&sketch.keys, from, pieces);
                            value_parts[bucket] =
                                joined::<F, N>(&sketch.values, from, pieces) * sign;
                        }
                        if comptime!(blueprint.sketch.signed_keys) {
                            key_parts[bucket] *= sign;
                        }
                    }
                    own_rows.keys[a * own + c] = median::<F, N>(&mut key_parts, buckets);
                    own_rows.values[a * own + c] = median::<F, N>(&mut value_parts, buckets);
                    // An absent token must add nothing. The entry read for it may hold NaN, and `0
                    // * NaN` is NaN.
                    if absent {
                        own_rows.values[a * own + c] = Vector::new(F::new(0.0));
                    }
                }
            }
            take_rows::<F, N>(
                &q,
                &own_rows,
                &mut running,
                &mut outputs.token_logits,
                lane,
                weighing,
                shape,
            );
        }
        sync_cube();
    }

    let mut maxima = Array::<f32>::new(group);
    let mut sums = Array::<f32>::new(group);
    gather_sums(&running, &mut maxima, &mut sums, lane, shape);
    // The teams' sums are reduced: within a plane by exchange, over planes in shared memory.
    let planes = (units / blueprint.plane).comptime();
    let joined = blueprint.joined.comptime();
    let mut plane_maxima = Shared::<[f32]>::new_slice(comptime!(planes * group));
    let mut plane_sums = Shared::<[f32]>::new_slice(comptime!(planes * group));
    let mut rows = Shared::<[Vector<f32, N>]>::new_slice(comptime!(planes * joined * columns));
    let plane = unit / comptime!(blueprint.plane);
    let in_plane = unit % comptime!(blueprint.plane);
    #[unroll]
    for round in 0..comptime!(group / joined) {
        #[unroll]
        for h in 0..joined {
            let g = comptime!(round * joined + h);
            #[unroll]
            for level in 0..comptime!((blueprint.plane / team).ilog2()) {
                let distance = comptime!((team << level) as u32);
                let other = plane_shuffle_xor(maxima[g], distance);
                let top = larger(maxima[g], other);
                let rescale = (maxima[g] - top).exp();
                let rescaled = (other - top).exp();
                sums[g] = sums[g] * rescale + plane_shuffle_xor(sums[g], distance) * rescaled;
                maxima[g] = top;
                #[unroll]
                for c in 0..own {
                    let mut others = Vector::<f32, N>::empty();
                    #[unroll]
                    for e in 0..comptime!(blueprint.lanes) {
                        let part = running.values[g * own + c].extract(e);
                        others.insert(e, plane_shuffle_xor(part, distance));
                    }
                    running.values[g * own + c] = running.values[g * own + c]
                        * Vector::new(rescale)
                        + others * Vector::new(rescaled);
                }
            }
            if in_plane < team {
                if lane == 0 {
                    plane_maxima[plane * group + g] = maxima[g];
                    plane_sums[plane * group + g] = sums[g];
                }
                #[unroll]
                for c in 0..own {
                    let column = lane + c * team;
                    if column < columns {
                        rows[(plane * joined + h) * columns + column] = running.values[g * own + c];
                    }
                }
            }
        }
        sync_cube();
        let mut at = unit;
        while at < comptime!(joined * columns) {
            let h = at / columns;
            let g = round * joined + h;
            let column = at % columns;
            let mut top = f32::new(LOWEST_LOGIT);
            for p in 0..planes {
                top = larger(top, plane_maxima[p * group + g]);
            }
            let mut sum = 0.0f32;
            let mut total = Vector::<f32, N>::new(0.0f32);
            for p in 0..planes {
                let weight = (plane_maxima[p * group + g] - top).exp();
                sum += plane_sums[p * group + g] * weight;
                total += rows[(p * joined + h) * columns + column] * Vector::new(weight);
            }
            let head = kv_head * group + g;
            let part = (kv_head * splits + split) * group + g;
            if comptime!(blueprint.split) {
                outputs.heads.partial[part * columns + column] = total;
            } else {
                outputs.heads.output[head * columns + column] =
                    Vector::cast_from(total / Vector::new(divisor(sum)));
            }
            if column == 0 {
                if comptime!(blueprint.split) {
                    outputs.heads.stats[part * 2] = top;
                    outputs.heads.stats[part * 2 + 1] = sum;
                } else {
                    // A head that attends to nothing gets `ln 0 = −∞`.
                    outputs.heads.log_sum_exp[head] = top + sum.ln();
                }
            }
            at += units;
        }
        if comptime!(joined < group) {
            sync_cube();
        }
    }
}

/// A row's vector, rounded, made of the vectors of an entry.
#[cube]
fn joined<F: Float, N: Size>(
    entries: &[Vector<f32, Const<4>>],
    from: usize,
    #[comptime] pieces: usize,
) -> Vector<F, N> {
    let mut vector = Vector::<F, N>::empty();
    #[unroll]
    for piece in 0..pieces {
        let part = entries[from + piece];
        #[unroll]
        for e in 0..ENTRY {
            vector.insert(comptime!(piece * ENTRY + e), F::cast_from(part.extract(e)));
        }
    }
    vector
}
