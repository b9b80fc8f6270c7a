//! The kernels: scores in parts and a choice a range, or both at once, a cube a range.

use cubecl::prelude::*;

use super::choose::{retrieve, settle};
use super::conclude::{Chosen, all_of, conclude};
use super::decide::{decide, sight_of};
use super::log_sums::log_sums;
use super::marks::{CHUNK, MARKS, WORD};
use super::score::score_part;
use super::table::*;
use super::{ScoreReduction, SimilarityReduction};

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    /// Vectors of a row.
    pub(crate) columns: usize,
    /// Units that share a row, a power of two within a plane.
    pub(crate) team: usize,
    /// Units of a cube.
    pub(crate) units: usize,
    /// Vectors that similarity is of, and their length.
    pub(crate) parts: usize,
    pub(crate) length: usize,
    pub(crate) sets: usize,
    pub(crate) width: usize,
    pub(crate) reduction: ScoreReduction,
    pub(crate) similarity: SimilarityReduction,
    /// Whether sets are shared at all.
    pub(crate) shares: bool,
    pub(crate) certified: bool,
    /// Whether all ranges are scored.
    pub(crate) measures: bool,
    /// Whether the kernel scores.
    pub(crate) scores: bool,
    /// Whether the kernel chooses.
    pub(crate) chooses: bool,
    /// Whether barriers for shared memory leave memory unordered.
    pub(crate) fenced: bool,
    /// Slots whose ordered scores shared memory has room for; 0 where they go to memory.
    pub(crate) staged: usize,
    /// Rows that a team reads before it waits for the first.
    pub(crate) ahead: usize,
}

impl Blueprint {
    /// Whether scores are ordered as they are made: those of one query are in the order of its weights.
    pub(crate) fn direct(&self) -> bool {
        self.group == 1 && !self.measures && !self.certified
    }
}

/// # Shapes
/// As for [`step`].
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
    marks: &mut [u32],
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
    step::<F, N>(
        query,
        keys,
        vectors,
        set_vectors,
        offsets[pair] as usize,
        lengths[pair],
        newest[pair / kv_heads],
        table,
        logits,
        ordered,
        marks,
        norms,
        log_sum_exp,
        pair,
        cube % splits,
        splits,
        scored_parts,
        stride,
        radius,
        block,
        hidden,
        scale,
        blueprint,
    );
}

/// What a cube does of a range's step; returns what the step reads, where the cube chooses.
///
/// # Shapes
/// In vectors: `query` `[P, G, columns]`, `keys` `[S, columns]`. `vectors` `[P, parts, length]`, `set_vectors`
/// `[P, sets, parts, length]`, `table` `[P, row]`; `logits` `[P, G, stride]`, `ordered` `[P, stride]`, `marks` `[P, 3, words]`,
/// `norms` `[P, scored_parts]`, `log_sum_exp` `[P, G]`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn step<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    vectors: &[F],
    set_vectors: &mut [f32],
    offset: usize,
    length: i32,
    position: i32,
    table: &mut [i32],
    logits: &mut [f32],
    ordered: &mut [u32],
    marks: &mut [u32],
    norms: &mut [f32],
    log_sum_exp: &mut [f32],
    pair: usize,
    split: usize,
    splits: usize,
    scored_parts: usize,
    stride: usize,
    radius: usize,
    block: usize,
    hidden: u32,
    scale: f32,
    #[comptime] blueprint: Blueprint,
) -> Chosen {
    let group = blueprint.group.comptime();
    let units = blueprint.units.comptime();
    let sets = blueprint.sets.comptime();
    let width = blueprint.width.comptime();
    let direct = comptime!(blueprint.direct());
    let staged = blueprint.staged.comptime();
    let unit = UNIT_POS as usize;
    let own = pair * comptime!(row(sets, width));
    let sinks = table[own + SINKS] as usize;
    let locals = table[own + LOCALS] as usize;
    let sight = sight_of(length, position, sinks, locals, hidden);
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
    let mut near = Shared::<[u32]>::new_slice(comptime!(staged.max(1)));
    let mut near_marks =
        Shared::<[u32]>::new_slice(comptime!(MARKS * staged.div_ceil(WORD).max(1)));
    let marked = pair * MARKS * stride.div_ceil(WORD);
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
            let mut from = 0usize;
            let mut count = sight.length - gap;
            if direct {
                from = sight.sinks;
                count = sight.local - sight.start;
            }
            let share = count.div_ceil(splits);
            let first = min(split * share, count);
            let end = min(first + share, count);
            let (first, end) = (from + first, from + end);
            let norm = if comptime!(staged > 0) {
                score_part::<F, N>(
                    query,
                    keys,
                    logits,
                    &mut near,
                    0usize,
                    pair,
                    offset,
                    first,
                    end,
                    sight.sinks,
                    gap,
                    stride,
                    scale,
                    blueprint,
                )
            } else {
                score_part::<F, N>(
                    query,
                    keys,
                    logits,
                    ordered,
                    pair * stride,
                    pair,
                    offset,
                    first,
                    end,
                    sight.sinks,
                    gap,
                    stride,
                    scale,
                    blueprint,
                )
            };
            if comptime!(blueprint.certified) {
                let mut largest = Shared::<[f32]>::new_slice(units);
                largest[unit] = norm;
                sync_cube();
                if unit == 0 {
                    let mut most = 0.0f32;
                    for other in 0..units {
                        most = max(most, largest[other]);
                    }
                    norms[pair * splits + split] = most;
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
    let mut chosen = all_of(&sight);
    if comptime!(blueprint.chooses) {
        let retrieves = decided == i32::new(RETRIEVES as i64);
        let mut set = 0usize;
        if decided > 0 {
            set = decided as usize;
        }
        let all = comptime!(blueprint.measures);
        if all || retrieves {
            settle(blueprint.fenced);
            let base = pair * group * stride;
            let mut sums = Array::<f32>::new(group);
            #[unroll]
            for g in 0..group {
                sums[g] = 0.0f32;
            }
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
                if comptime!(direct && staged > 0 && !blueprint.scores) {
                    let mut i = sight.start + unit;
                    while i < sight.local {
                        let mut some = Array::<u32>::new(CHUNK);
                        #[unroll]
                        for c in 0..CHUNK {
                            let at = min(i + c * units, sight.local - 1);
                            some[c] = ordered[pair * stride + at];
                        }
                        #[unroll]
                        for c in 0..CHUNK {
                            let at = i + c * units;
                            if at < sight.local {
                                near[at] = some[c];
                            }
                        }
                        i += CHUNK * units;
                    }
                }
                let (count, dropped) = if comptime!(staged > 0) {
                    retrieve(
                        &*logits,
                        &mut near,
                        0usize,
                        &mut near_marks,
                        0usize,
                        table,
                        &sums,
                        pair,
                        stride,
                        &sight,
                        to,
                        top,
                        dilated,
                        radius,
                        block,
                        hidden,
                        blueprint,
                    )
                } else {
                    retrieve(
                        &*logits,
                        ordered,
                        pair * stride,
                        marks,
                        marked,
                        table,
                        &sums,
                        pair,
                        stride,
                        &sight,
                        to,
                        top,
                        dilated,
                        radius,
                        block,
                        hidden,
                        blueprint,
                    )
                };
                let parts = comptime!(blueprint.parts * blueprint.length);
                if comptime!(blueprint.shares) {
                    let mut i = unit;
                    while i < parts {
                        set_vectors[(pair * sets + set) * parts + i] =
                            f32::cast_from(vectors[pair * parts + i]);
                        i += units;
                    }
                }
                if unit == 0 {
                    let fields = own + FIELDS + set * SET_FIELDS;
                    table[fields + COUNT] = i32::cast_from(count);
                    if comptime!(blueprint.certified) {
                        // The parts' norms of this kernel's or of the one before it.
                        let mut most = 0.0f32;
                        if comptime!(blueprint.scores) {
                            most = norms[pair * splits + split];
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
                settle(blueprint.fenced);
            }
        }
        let read = conclude(table, own, &sight, decided, set, distance, sets, width);
        chosen.first = read.first;
        chosen.count = read.count;
        chosen.local = read.local;
    }
    chosen
}
