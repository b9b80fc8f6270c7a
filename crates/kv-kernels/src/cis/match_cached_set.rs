//! Decides whether a step shares a cached set: compares the step's vectors with the vectors of
//! earlier steps of its block, by cosine.

use cubecl::prelude::*;

use super::SimilarityReduction;
use super::blueprint::Blueprint;
use super::table::*;
use super::visible_range::StepContext;
use crate::components::sentinels::{ALL_SLOTS, NEW_SET};

/// The decision for a range's step: share a set, retrieve one, or read all slots.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Decision {
    /// The list of the most recent entry whose similarity is above the threshold, or [`NEW_SET`]
    /// for a step that retrieves, or [`ALL_SLOTS`] for a step that reads all slots.
    pub(super) decided: i32,
    /// Tokens of the shared list.
    pub(super) count: usize,
    /// Tokens of the step's own choice, where it retrieves and reads the choice.
    pub(super) choice: usize,
}

/// A unit's partial sums of the cosines between the step's vectors and an entry's vectors; and the
/// entry's list, and the length of that list.
#[derive(CubeType)]
pub(super) struct SimilarityPartials {
    dots: Array<f32>,
    own_norms: Array<f32>,
    norms: Array<f32>,
    list: i32,
    count: i32,
}

/// Loads and sums the partials of the entry that the unit's plane compares. It is not known yet
/// whether the block has such an entry, so that this read and the read of the row do not wait for
/// each other.
///
/// # Shapes
/// `vectors` `[P, parts, length]`, `set_vectors` `[P, sets, parts, length]`.
#[cube]
pub(super) fn load_similarity_partials<F: Float>(
    vectors: &[F],
    set_vectors: &[f32],
    table: &[i32],
    kv_head: usize,
    #[comptime] blueprint: Blueprint,
) -> SimilarityPartials {
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    load_entry_partials::<F>(vectors, set_vectors, table, kv_head, plane, blueprint)
}

/// The partials of entry `set`, or of the last entry where `set` is beyond it.
#[cube]
fn load_entry_partials<F: Float>(
    vectors: &[F],
    set_vectors: &[f32],
    table: &[i32],
    kv_head: usize,
    set: usize,
    #[comptime] blueprint: Blueprint,
) -> SimilarityPartials {
    let (sets, parts, length) = comptime!((blueprint.sets, blueprint.parts, blueprint.length));
    let set = min(set, comptime!(sets - 1));
    let own = kv_head * comptime!(parts * length);
    let from = (kv_head * sets + set) * comptime!(parts * length);
    let rounds = comptime!(length.div_ceil(blueprint.plane));
    let chunk = comptime!(rounds.min(blueprint.chunk));
    let row = kv_head * comptime!(row(blueprint.sets, blueprint.width));
    let mut seen = SimilarityPartials {
        dots: Array::new(parts),
        own_norms: Array::new(parts),
        norms: Array::new(parts),
        list: table[row + FIELDS + set * SET_FIELDS + LIST],
        count: table[row + FIELDS + set * SET_FIELDS + COUNT],
    };
    #[unroll]
    for part in 0..parts {
        let mut dot = 0.0f32;
        let mut own_norm = 0.0f32;
        let mut norm = 0.0f32;
        for some in 0..comptime!(rounds.div_ceil(chunk)) {
            #[unroll]
            for c in 0..chunk {
                let i = (some * chunk + c) * PLANE_DIM as usize + UNIT_POS_PLANE as usize;
                let at = part * length + min(i, comptime!(length - 1));
                let a = select(i < length, f32::cast_from(vectors[own + at]), 0.0f32);
                let b = select(i < length, set_vectors[from + at], 0.0f32);
                dot += a * b;
                own_norm += a * a;
                norm += b * b;
            }
        }
        seen.dots[part] = dot;
        seen.own_norms[part] = own_norm;
        seen.norms[part] = norm;
    }
    seen
}

/// Finds the most recent entry of the block whose similarity is above the threshold. `first` holds
/// each unit's partials of the first round of entries.
///
/// # Shapes
/// The shapes of [`load_similarity_partials`].
#[cube]
pub(super) fn match_cached_set<F: Float>(
    first: &SimilarityPartials,
    vectors: &[F],
    set_vectors: &[f32],
    table: &[i32],
    context: &StepContext,
    #[comptime] blueprint: Blueprint,
) -> Decision {
    let mut decided = i32::new(NEW_SET as i64);
    let mut count = 0usize;
    if comptime!(blueprint.shares) {
        let sets = blueprint.sets.comptime();
        let mut similarities = Shared::<[f32]>::new_slice(sets);
        let mut counts = Shared::<[i32]>::new_slice(sets);
        let mut lists = Shared::<[i32]>::new_slice(sets);
        // Each plane compares one entry.
        let plane = (UNIT_POS / PLANE_DIM) as usize;
        let planes = (CUBE_DIM / PLANE_DIM) as usize;
        let similarity = compare(first, blueprint);
        if plane < context.held && UNIT_POS_PLANE == 0 {
            similarities[plane] = similarity;
            counts[plane] = first.count;
            lists[plane] = first.list;
        }
        for round in 1..context.held.div_ceil(planes) {
            let set = round * planes + plane;
            let seen = load_entry_partials::<F>(
                vectors,
                set_vectors,
                table,
                context.kv_head,
                set,
                blueprint,
            );
            let similarity = compare(&seen, blueprint);
            if set < context.held && UNIT_POS_PLANE == 0 {
                similarities[set] = similarity;
                counts[set] = seen.count;
                lists[set] = seen.list;
            }
        }
        sync_cube();
        for set in 0..context.held {
            if similarities[set] > context.threshold || context.threshold <= -1.0f32 {
                decided = lists[set];
                count = counts[set] as usize;
            }
        }
    }
    if context.visible.local - context.visible.start <= context.top {
        decided = i32::new(ALL_SLOTS as i64);
    }
    Decision { decided, count, choice: 0usize }
}

/// The similarity of an entry to the step: the mean or the least of the vectors' cosines.
#[cube]
fn compare(seen: &SimilarityPartials, #[comptime] blueprint: Blueprint) -> f32 {
    let parts = blueprint.parts.comptime();
    let least = comptime!(blueprint.similarity == SimilarityReduction::Min);
    let mut similarity = 0.0f32;
    if least {
        similarity = 1.0f32;
    }
    #[unroll]
    for part in 0..parts {
        let both = (plane_sum(seen.own_norms[part]) * plane_sum(seen.norms[part])).sqrt();
        let dot = plane_sum(seen.dots[part]);
        let mut cosine = 0.0f32;
        if both > 0.0 {
            cosine = min(dot / both, 1.0f32);
        }
        if least {
            similarity = min(similarity, cosine);
        } else {
            similarity += cosine / comptime!(parts as f32);
        }
    }
    min(similarity, 1.0f32)
}
