//! The kernels: scores in parts and a choice a range, or both at once, a cube a range.

use cubecl::prelude::*;

use super::choose::{conclude, log_sums, retrieve, settle};
use super::decide::{decide, sight_of};
use super::score::score_part;
use super::table::*;
use super::{ScoreReduction, SimilarityReduction};

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    /// Query heads of a key-value head.
    pub(super) group: usize,
    /// Vectors of a row.
    pub(super) columns: usize,
    /// Units that share a row, a power of two within a plane.
    pub(super) team: usize,
    /// Units of a cube.
    pub(super) units: usize,
    /// Vectors that similarity is of, and their length.
    pub(super) parts: usize,
    pub(super) length: usize,
    pub(super) sets: usize,
    pub(super) width: usize,
    pub(super) reduction: ScoreReduction,
    pub(super) similarity: SimilarityReduction,
    /// Whether sets are shared at all.
    pub(super) shares: bool,
    pub(super) certified: bool,
    /// Whether all ranges are scored.
    pub(super) measures: bool,
    /// Whether the kernel scores.
    pub(super) scores: bool,
    /// Whether the kernel chooses.
    pub(super) chooses: bool,
    /// Whether barriers for shared memory leave memory unordered.
    pub(super) fenced: bool,
}

/// # Shapes
/// In vectors: `query` `[P, G, columns]`, `keys` `[S, columns]`. `vectors` `[P, parts, length]`, `set_vectors`
/// `[P, sets, parts, length]`, `table` `[P, row]`; `logits` `[P, G, stride]`, `ordered` `[P, stride]`,
/// `norms` `[P, scored_parts]`, `log_sum_exp` `[P, G]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn retrieve_kernel<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    vectors: &[F],
    set_vectors: &mut [f32],
    offsets: &[i32],
    lengths: &[i32],
    newest: &[i32],
    table: &mut [i32],
    logits: &mut [f32],
    ordered: &mut [u32],
    norms: &mut [f32],
    log_sum_exp: &mut [f32],
    pairs: usize,
    kv_heads: usize,
    splits: usize,
    scored_parts: usize,
    stride: usize,
    radius: usize,
    block: usize,
    hidden: u32,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let cube = CUBE_POS;
    if cube >= pairs * splits {
        terminate!();
    }
    let pair = cube / splits;
    let split = cube % splits;
    let group = blueprint.group.comptime();
    let units = blueprint.units.comptime();
    let sets = blueprint.sets.comptime();
    let width = blueprint.width.comptime();
    let unit = UNIT_POS as usize;
    let own = pair * comptime!(row(sets, width));
    let position = newest[pair / kv_heads];
    let sinks = table[own + SINKS] as usize;
    let locals = table[own + LOCALS] as usize;
    let sight = sight_of(lengths[pair], position, sinks, locals, hidden);
    let top = table[own + TOP] as usize;
    let share = f32::reinterpret(table[own + DILATED]);
    let dilated = min((f32::cast_from(top) * share + ROUNDING) as usize, top);
    let threshold = f32::reinterpret(table[own + THRESHOLD]);
    let own_block = max(position, 0i32) / i32::cast_from(block);
    let mut held = 0usize;
    if table[own + BLOCK] == own_block {
        held = min(table[own + SETS] as usize, sets);
    }
    let mut decided = table[own + DECIDED];
    let mut distance = f32::reinterpret(table[own + DISTANCE]);
    if comptime!(blueprint.scores) {
        let (found, apart) = decide::<F>(
            vectors,
            &*set_vectors,
            pair,
            held,
            sight.local - sight.start,
            top,
            threshold,
            blueprint,
        );
        decided = found;
        distance = apart;
        let all = comptime!(blueprint.measures);
        if all || decided == i32::new(RETRIEVES as i64) {
            let gap = sight.start - sight.sinks;
            let count = sight.length - gap;
            let share = count.div_ceil(splits);
            let first = min(split * share, count);
            let end = min(first + share, count);
            let norm = score_part::<F, N>(
                query,
                keys,
                logits,
                pair,
                offsets[pair] as usize,
                first,
                end,
                sight.sinks,
                gap,
                stride,
                scale,
                blueprint,
            );
            if comptime!(blueprint.certified) {
                let mut largest = Shared::<[f32]>::new_slice(units);
                largest[unit] = norm;
                sync_cube();
                if unit == 0 {
                    let mut most = 0.0f32;
                    for other in 0..units {
                        most = max(most, largest[other]);
                    }
                    norms[cube] = most;
                }
            }
        }
        if comptime!(!blueprint.chooses) {
            // Nothing here reads these fields.
            if split == 0 && unit == 0 {
                table[own + DECIDED] = decided;
                table[own + DISTANCE] = i32::reinterpret(distance);
            }
        }
    }
    if comptime!(blueprint.chooses) {
        settle(blueprint.fenced);
        let retrieves = decided == i32::new(RETRIEVES as i64);
        let mut set = 0usize;
        if decided > 0 {
            set = decided as usize;
        }
        let all = comptime!(blueprint.measures);
        if all || retrieves {
            let base = pair * group * stride;
            let mut sums = Array::<f32>::new(group);
            #[unroll]
            for g in 0..group {
                sums[g] = 0.0f32;
            }
            // The logits of one query are in the order of its weights.
            if comptime!(blueprint.measures || blueprint.certified || group > 1) {
                let own = log_sums(&*logits, base, stride, &sight, group, units);
                #[unroll]
                for g in 0..group {
                    sums[g] = own[g];
                }
            }
            if comptime!(blueprint.measures) && unit == 0 {
                #[unroll]
                for g in 0..group {
                    log_sum_exp[pair * group + g] = sums[g];
                }
            }
            if retrieves {
                set = min(held, comptime!(sets - 1));
                let to = own + comptime!(FIELDS + sets * SET_FIELDS) + set * width;
                let (count, dropped) = retrieve(
                    &*logits, ordered, table, &sums, pair, stride, &sight, to, top, dilated,
                    radius, block, hidden, blueprint,
                );
                let parts = comptime!(blueprint.parts * blueprint.length);
                if comptime!(blueprint.shares) {
                    let mut i = unit;
                    while i < parts {
                        set_vectors[(pair * sets + set) * parts + i] =
                            f32::cast_from(vectors[pair * parts + i]);
                        i += units;
                    }
                }
                settle(blueprint.fenced);
                if unit == 0 {
                    let fields = own + FIELDS + set * SET_FIELDS;
                    table[fields + COUNT] = i32::cast_from(count);
                    if comptime!(blueprint.certified) {
                        // The parts' norms of this kernel's or of the one before it.
                        let mut most = 0.0f32;
                        if comptime!(blueprint.scores) {
                            most = norms[cube];
                        } else {
                            for part in 0..scored_parts {
                                most = max(most, norms[pair * scored_parts + part]);
                            }
                        }
                        table[fields + KEY_NORM] = i32::reinterpret(most.sqrt());
                        table[fields + DROPPED] = i32::reinterpret(dropped);
                    }
                    let wanted = table[own + WANTED] as usize;
                    if wanted > 0 {
                        // Half of what is amiss, and at least one.
                        let mut next = top + (wanted - min(count, wanted)).div_ceil(2);
                        if count > wanted {
                            let less = (count - wanted).div_ceil(2);
                            next = top - min(less, top);
                        }
                        table[own + TOP] = i32::cast_from(max(min(next, wanted), 1usize));
                    }
                    table[own + BLOCK] = own_block;
                    table[own + SETS] = i32::cast_from(set + 1);
                }
            }
        }
        if unit == 0 {
            conclude(table, own, &sight, decided, set, distance, sets, width);
        }
    }
}
