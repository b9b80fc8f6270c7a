//! Top-k selection in long ranges, with several cubes a range, in five kernels. One cube a range
//! (`step.rs`) would leave most of the device idle while it searches a long range.
//!
//! 1. `match_sets.rs`: one cube a range decides whether the range retrieves, and finishes its step
//!    if it does not.
//! 2. `score.rs`: scores the ranges that retrieve, in parts.
//! 3. `build_histogram.rs`: makes sort keys and counts them in 4,096 bins of equal width.
//! 4. `write_bitmask.rs`: finds the pivot bins, which hold the `k_top`-th and the `k_dilate`-th
//!    highest score. Sets the bits of slots in higher bins, and collects the slots of the pivot
//!    bins as candidates.
//! 5. `finish_steps.rs`: one cube a range selects among the candidates exactly
//!    (`refine_bitmask.rs`), lists the set and finishes the step.
//!
//! Only the device knows which ranges retrieve. So the launches have a fixed number of cubes, which
//! share the work of all ranges that retrieve, few or many (`tasks.rs`).
//!
//! Scores are logarithms of weights, or logits where one query head is a group. Bins divide the
//! interval below the highest possible weight, or below the highest logit. Where a pivot bin holds
//! more candidates than there is room for, the last kernel selects among all scores, as in short
//! ranges.

mod build_histogram;
mod finish_steps;
mod kernel_args;
mod launch;
mod log_sums;
mod match_sets;
mod pivot_bins;
mod refine_bitmask;
mod score;
mod shared_memory;
mod tasks;
mod write_bitmask;

use cubecl::prelude::*;

use super::bitmask::WORD;
use super::blueprint::Blueprint;
use crate::components::sort_key::number_of_key;
use log_sums::sums_of;

/// Bins of a range's scores.
const BINS: usize = 4_096;
/// Bins of a unit of score. The bins span 32 units.
const FINENESS: f32 = 128.0;
/// The most candidates of a pivot bin that the last kernel orders, with much shared memory and with
/// little; and the sub-bins of a pivot bin.
const MOST_CANDIDATES: usize = 1_024;
const FEWEST_CANDIDATES: usize = 256;
const FINER: usize = 256;
/// Slots that a cube counts and selects together.
const PART: usize = 2_048;
const PART_WORDS: usize = PART / WORD;
/// Numbers for the two pivot bins of a range: how many scores are above each bin, and, from
/// `PIVOT_WITHIN` on, how many are in it.
const PIVOTS: usize = 4;
const PIVOT_WITHIN: usize = 2;

/// The score at which a range's bins begin. A weight is at most 1, so its logarithm is at most 0;
/// sums over a group may exceed 1 and fall into the first bin. Logits have no such bound, so the
/// largest logit is taken.
#[cube]
fn top_of_bins(
    part_sums: &[f32],
    kv_head: usize,
    parts: usize,
    #[comptime] blueprint: Blueprint,
) -> f32 {
    let mut top_of_bins = 0.0f32;
    if comptime!(blueprint.direct()) {
        let sums = sums_of(part_sums, kv_head, parts, blueprint);
        top_of_bins = sums.tops[0];
    }
    top_of_bins
}

/// The bin of a score, given its sort key ([`sort_key`](crate::components::sort_key::sort_key));
/// the first bin holds the highest scores. NaN falls into the last bin, as its key is the lowest.
#[cube]
fn bin_of(key: u32, top_of_bins: f32) -> usize {
    let below = (top_of_bins - number_of_key(key)) * FINENESS;
    let mut bin = comptime!(BINS - 1).runtime();
    if key > 0 && below < comptime!((BINS - 1) as f32) {
        bin = max(below, 0.0f32) as usize;
    }
    bin
}

/// The sub-bin of a score within its bin; the first sub-bin holds the highest scores.
#[cube]
fn finer_bin_of(key: u32, top_of_bins: f32) -> usize {
    let below = max((top_of_bins - number_of_key(key)) * FINENESS, 0.0f32);
    let mut bin = comptime!(FINER - 1).runtime();
    // The last bin also holds all lower scores: these fall into its last sub-bin.
    if key > 0 && below < comptime!(BINS as f32) {
        let part = ((below - below.floor()) * comptime!(FINER as f32)) as usize;
        bin = min(part, comptime!(FINER - 1));
    }
    bin
}
