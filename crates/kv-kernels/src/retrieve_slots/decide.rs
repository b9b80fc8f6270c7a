//! What a range's step sees, and whether it shares a set.

use cubecl::prelude::*;

use super::SimilarityReduction;
use super::kernel::Blueprint;
use super::table::*;

/// What a range's step sees: slots, counted from the range's first.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Sight {
    pub(super) length: usize,
    pub(super) sinks: usize,
    /// First slot in sight behind the sinks.
    pub(super) start: usize,
    /// First local slot.
    pub(super) local: usize,
    /// What a token's index is ahead of its slot.
    pub(super) freed: usize,
    /// Tokens so far.
    pub(super) tokens: usize,
}

#[cube]
pub(super) fn sight_of(
    length: i32,
    newest: i32,
    sinks: usize,
    locals: usize,
    hidden: u32,
) -> Sight {
    let length = max(length, 0i32) as usize;
    let tokens = max(newest + 1i32, 0i32) as usize;
    let freed = tokens - min(tokens, length);
    let sinks = min(sinks, length);
    let first = first_in_sight(hidden, tokens);
    let start = min(max(first - min(first, freed), sinks), length);
    let local = max(length - min(locals, length), start);
    Sight { length, sinks, start, local, freed, tokens }
}

/// The first of `tokens` tokens that the last of them sees behind the sinks, counted from 0.
#[cube]
pub(super) fn first_in_sight(hidden: u32, tokens: usize) -> usize {
    let start = hidden.mul_hi(tokens as u32);
    (start - min(start, 1u32)) as usize
}

/// What a range's step knows before it compares.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Outset {
    /// Where its row in the table begins.
    pub(super) own: usize,
    pub(super) sight: Sight,
    /// Slots that are retrieved, before neighbours.
    pub(super) top: usize,
    pub(super) threshold: f32,
    /// The block of steps that it belongs to, and the sets that this has by now.
    pub(super) block: i32,
    pub(super) held: usize,
}

#[cube]
pub(super) fn outset_of(
    table: &[i32],
    pair: usize,
    length: i32,
    position: i32,
    block: usize,
    hidden: u32,
    #[comptime] blueprint: Blueprint,
) -> Outset {
    let sets = blueprint.sets.comptime();
    let own = pair * comptime!(row(blueprint.sets, blueprint.width));
    let sinks = table[own + SINKS] as usize;
    let locals = table[own + LOCALS] as usize;
    let sight = sight_of(length, position, sinks, locals, hidden);
    let top = table[own + TOP] as usize;
    let threshold = f32::reinterpret(table[own + THRESHOLD]);
    let block = max(position, 0i32) / i32::cast_from(block);
    let mut held = 0usize;
    if table[own + BLOCK] == block {
        held = min(table[own + SETS] as usize, sets);
    }
    Outset { own, sight, top, threshold, block, held }
}

/// The most recent of a range's sets whose vectors are similar enough, [`RETRIEVES`] or [`ALL`], and by how much the
/// vectors differ.
///
/// # Shapes
/// `vectors` `[P, parts, length]`, `set_vectors` `[P, sets, parts, length]`.
#[cube]
pub(super) fn decide<F: Float>(
    vectors: &[F],
    set_vectors: &[f32],
    pair: usize,
    outset: &Outset,
    #[comptime] blueprint: Blueprint,
) -> (i32, f32) {
    let mut decided = i32::new(RETRIEVES as i64);
    let mut distance = 0.0f32;
    if comptime!(blueprint.shares) {
        let sets = blueprint.sets.comptime();
        let mut similarities = Shared::<[f32]>::new_slice(sets);
        let mut distances = Shared::<[f32]>::new_slice(sets);
        // A plane a set. The first of them whether it is held or not, so that it need not wait for their number.
        let plane = (UNIT_POS / PLANE_DIM) as usize;
        let planes = (CUBE_DIM / PLANE_DIM) as usize;
        for round in 0..max(outset.held.div_ceil(planes), 1usize) {
            let set = round * planes + plane;
            let (similarity, farthest) =
                compare::<F>(vectors, set_vectors, pair, min(set, comptime!(sets - 1)), blueprint);
            if set < outset.held && UNIT_POS_PLANE == 0 {
                similarities[set] = similarity;
                distances[set] = farthest;
            }
        }
        sync_cube();
        for set in 0..outset.held {
            if similarities[set] > outset.threshold || outset.threshold <= -1.0f32 {
                decided = i32::cast_from(set);
                distance = distances[set];
            }
        }
    }
    if outset.sight.local - outset.sight.start <= outset.top {
        decided = i32::new(ALL as i64);
        distance = 0.0f32;
    }
    (decided, distance)
}

/// How similar a set's vectors are, and by how much they differ, the most of the parts.
#[cube]
fn compare<F: Float>(
    vectors: &[F],
    set_vectors: &[f32],
    pair: usize,
    set: usize,
    #[comptime] blueprint: Blueprint,
) -> (f32, f32) {
    let sets = blueprint.sets.comptime();
    let parts = blueprint.parts.comptime();
    let length = blueprint.length.comptime();
    let least = comptime!(blueprint.similarity == SimilarityReduction::Min);
    let from = (pair * sets + set) * comptime!(parts * length);
    let mut similarity = 0.0f32;
    if least {
        similarity = 1.0f32;
    }
    let mut farthest = 0.0f32;
    for part in 0..parts {
        let mut dot = 0.0f32;
        let mut own_norm = 0.0f32;
        let mut norm = 0.0f32;
        let mut apart = 0.0f32;
        let mut i = UNIT_POS_PLANE as usize;
        while i < length {
            let at = part * length + i;
            let a = f32::cast_from(vectors[pair * comptime!(parts * length) + at]);
            let b = set_vectors[from + at];
            dot += a * b;
            own_norm += a * a;
            norm += b * b;
            apart += (a - b) * (a - b);
            i += PLANE_DIM as usize;
        }
        dot = plane_sum(dot);
        let norms = (plane_sum(own_norm) * plane_sum(norm)).sqrt();
        let mut cosine = 0.0f32;
        if norms > 0.0 {
            cosine = min(dot / norms, 1.0f32);
        }
        if least {
            similarity = min(similarity, cosine);
        } else {
            similarity += cosine / comptime!(parts as f32);
        }
        farthest = max(farthest, plane_sum(apart).sqrt());
    }
    (min(similarity, 1.0f32), farthest)
}
