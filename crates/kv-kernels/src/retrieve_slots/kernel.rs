//! The kernel that chooses, a cube a range: behind scores that others have made, or that it makes
//! itself.

use cubecl::prelude::*;

use super::choose::{retrieve, wanted_of};
use super::conclude::{Chosen, conclude, keep, keep_shared};
use super::decide::{Decision, decide, glimpse};
use super::list::Lists;
use super::log_sums::log_sums;
use super::marks::{CHUNK, MARKS, WORD};
use super::score::score_split;
use super::sift::Sums;
use super::sight::outset_of;
use super::table::*;
use super::{ScoreReduction, SimilarityReduction};
use crate::barrier::sync_memory;

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    /// Vectors of a row.
    pub(crate) columns: usize,
    /// Units that share a row, a power of two within a plane.
    pub(crate) team: usize,
    /// Whether matrix instructions score rows, by tiles of 16: then a team is of 4, and a unit has
    /// every fourth vector.
    pub(crate) tiles: bool,
    /// Units of a cube, and of a plane, at least.
    pub(crate) units: usize,
    pub(crate) plane: usize,
    /// Vectors that similarity is of, and their length.
    pub(crate) parts: usize,
    pub(crate) length: usize,
    pub(crate) sets: usize,
    pub(crate) width: usize,
    pub(crate) reduction: ScoreReduction,
    pub(crate) similarity: SimilarityReduction,
    /// Whether sets are shared at all, and with steps that shared themselves.
    pub(crate) shares: bool,
    pub(crate) chains: bool,
    /// Whether steps that retrieve read their own choice rather than their set.
    pub(crate) reads_choice: bool,
    pub(crate) certified: bool,
    /// Whether all ranges are scored.
    pub(crate) measures: bool,
    /// Whether the kernel that chooses scores first, or finds scores.
    pub(crate) scores: bool,
    /// Whether barriers for shared memory leave memory unordered.
    pub(crate) fenced: bool,
    /// Slots whose ordered scores shared memory has room for; 0 where they go to memory.
    pub(crate) staged: usize,
    /// Rows that a team reads before it waits for the first, or tiles that a plane does.
    pub(crate) ahead: usize,
    /// Whether others sift the scores that the kernel makes.
    pub(crate) sifted: bool,
}

impl Blueprint {
    /// Whether scores are ordered as they are made: those of one query are in the order of its
    /// weights.
    pub(crate) fn direct(&self) -> bool {
        self.group == 1 && !self.measures && !self.certified
    }

    /// Planes of a cube, at most.
    pub(crate) fn planes(&self) -> usize {
        self.units.div_ceil(self.plane)
    }

    /// Query heads whose logits a unit gets.
    pub(crate) fn held(&self) -> usize {
        self.group.div_ceil(self.team)
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
    scored_parts: usize,
    stride: usize,
    radius: usize,
    block: usize,
    hidden: u32,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let pair = CUBE_POS;
    if pair >= pairs {
        terminate!();
    }
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
        scored_parts,
        stride,
        radius,
        block,
        hidden,
        scale,
        blueprint,
    );
}

/// A range's step by a cube; returns what it reads.
///
/// # Shapes
/// In vectors: `query` `[P, G, columns]`, `keys` `[S, columns]`. `vectors` `[P, parts, length]`,
/// `set_vectors` `[P, sets, parts, length]`, `table` `[P, row]`; `logits` `[P, G, stride]`,
/// `ordered` `[P, stride]`, `marks` `[P, 3, words]`, `norms` `[P, scored_parts]`, `log_sum_exp`
/// `[P, G]`.
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
    let outset = outset_of(&*table, pair, length, position, block, hidden, blueprint);
    let own = outset.own;
    let sight = &outset.sight;
    let wanted = wanted_of(&*table, own);
    let mut decided = table[own + DECIDED];
    let mut distance = f32::reinterpret(table[own + DISTANCE]);
    let mut near = Shared::<[u32]>::new_slice(comptime!(staged.max(1)));
    let mut near_marks =
        Shared::<[u32]>::new_slice(comptime!(MARKS * staged.div_ceil(WORD).max(1)));
    let words = stride.div_ceil(WORD);
    let marked = pair * MARKS * words;
    let all = comptime!(blueprint.measures);
    if comptime!(blueprint.scores) {
        let first = glimpse::<F>(vectors, &*set_vectors, &*table, pair, blueprint);
        let decision =
            decide::<F>(&first, vectors, &*set_vectors, &*table, pair, &outset, blueprint);
        decided = decision.decided;
        distance = decision.distance;
        if all || decided == i32::new(RETRIEVES as i64) {
            let (scores, scores_at) = if comptime!(staged > 0) {
                (&mut near[..], 0usize)
            } else {
                (&mut ordered[..], pair * stride)
            };
            let mut none = Sums::none(comptime!(blueprint.held()));
            score_split::<F, N>(
                query, keys, logits, scores, scores_at, norms, &mut none, sight, pair, offset,
                0usize, 1usize, stride, scale, blueprint,
            );
        }
    }
    let retrieves = decided == i32::new(RETRIEVES as i64);
    if comptime!(blueprint.chains && blueprint.shares && !blueprint.scores) {
        // All have read the range's fields, as they have where they compared.
        sync_cube();
    }
    keep_shared::<F>(vectors, set_vectors, table, &outset, pair, decided, blueprint);
    let mut choice = 0usize;
    let mut dropped_now = 0.0f32;
    let mut set = 0usize;
    if decided > 0 {
        set = decided as usize;
    }
    if all || retrieves {
        sync_memory(blueprint.fenced);
        let base = pair * group * stride;
        let mut sums = Array::<f32>::new(group);
        #[unroll]
        for g in 0..group {
            sums[g] = 0.0f32;
        }
        if comptime!(blueprint.measures || blueprint.certified || group > 1) {
            let own = log_sums(&*logits, base, stride, sight, blueprint);
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
            set = min(outset.held, comptime!(sets - 1));
            let lists = Lists {
                set: own + comptime!(list(sets, width, 0)) + set * width,
                choice: own + comptime!(list(sets, width, sets)),
            };
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
            let (scores, scores_at, bits, bits_at) = if comptime!(staged > 0) {
                (&mut near[..], 0usize, &mut near_marks[..], 0usize)
            } else {
                (&mut ordered[..], pair * stride, &mut marks[..], marked)
            };
            let listed = retrieve(
                &*logits, scores, scores_at, bits, bits_at, words, table, &sums, pair, stride,
                sight, &lists, &wanted, radius, block, hidden, blueprint,
            );
            choice = listed.chosen;
            dropped_now = listed.dropped_now;
            keep::<F>(
                vectors,
                set_vectors,
                &*norms,
                table,
                &outset,
                pair,
                set,
                listed.count,
                listed.dropped,
                scored_parts,
                blueprint,
            );
            sync_memory(blueprint.fenced);
        }
    }
    let count = table[own + FIELDS + set * SET_FIELDS + COUNT] as usize;
    let decision = Decision { decided, distance, count, choice, dropped_now };
    conclude(table, own, sight, &decision, set, blueprint)
}
