//! Top-k selection of long ranges by several cubes a range, in five kernels.
//!
//! 1. `match_sets.rs`: one cube a range finds whether the range retrieves, and finishes its step if
//!    not.
//! 2. `score.rs`: scores the ranges that retrieve, in parts.
//! 3. `build_histogram.rs`: makes sort keys and counts them in 4,096 bins of equal width.
//! 4. `write_bitmask.rs`: finds the pivot bins, those of the `k_top`-th and of the `k_dilate`-th
//!    highest score, sets the bits of slots in higher bins, and collects the candidates of the
//!    pivot bins.
//! 5. `finish_steps.rs`: one cube a range selects among the candidates exactly
//!    (`refine_bitmask.rs`), lists the set and finishes the step.
//!
//! Which ranges retrieve is known on the device alone: as many cubes as it has room for share the
//! work of all of them (`tasks.rs`), whether one range retrieves or all do.
//!
//! Scores are logarithms of weights; bins divide the interval below the highest value that a weight
//! can have, or below the highest score. Where a pivot bin holds more candidates than there is room
//! for, the last kernel selects among all scores, as for short ranges.

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
/// Bins of a score's unit: 32 units lie between the first and the last.
const FINENESS: f32 = 128.0;
/// Candidates of a pivot bin that the last kernel orders, by how much shared memory there is, and
/// sub-bins of a pivot bin.
const MOST_CANDIDATES: usize = 1_024;
const FEWEST_CANDIDATES: usize = 256;
const FINER: usize = 256;
/// Slots that are counted and selected together.
const PART: usize = 2_048;
const PART_WORDS: usize = PART / WORD;
/// Numbers of a range's pivot bins, that of the set and that of its highest: how many scores are
/// above each bin, and within it.
const PIVOTS: usize = 4;
const PIVOT_WITHIN: usize = 2;

/// Where a range's bins begin: weights are 1 at most, and the first bin takes the excess of sums
/// over a group; logits have no such bound, so that their highest is taken.
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

/// The bin of a score by its sort key ([`sort_key`](crate::components::sort_key::sort_key)), the
/// highest first. NaN is in the last bin, as its key is the lowest.
#[cube]
fn bin_of(key: u32, top_of_bins: f32) -> usize {
    let below = (top_of_bins - number_of_key(key)) * FINENESS;
    let mut bin = comptime!(BINS - 1).runtime();
    if key > 0 && below < comptime!((BINS - 1) as f32) {
        bin = max(below, 0.0f32) as usize;
    }
    bin
}

/// The sub-bin of a score within its bin, the highest first.
#[cube]
fn finer_bin_of(key: u32, top_of_bins: f32) -> usize {
    let below = max((top_of_bins - number_of_key(key)) * FINENESS, 0.0f32);
    let mut bin = comptime!(FINER - 1).runtime();
    // What the last bin has beyond its own is in its last part.
    if key > 0 && below < comptime!(BINS as f32) {
        let part = ((below - below.floor()) * comptime!(FINER as f32)) as usize;
        bin = min(part, comptime!(FINER - 1));
    }
    bin
}
