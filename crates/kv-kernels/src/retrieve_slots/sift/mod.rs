//! Long ranges: many cubes score those that retrieve, count their scores by bins, and mark the
//! slots of those above an edge's, so that the cube that concludes has but the scores of two bins
//! to order: that of the set's last, and that of the last of its best.
//!
//! First, a cube a range decides whether it retrieves, and concludes if not. What is to be done is
//! known on the device alone: as many cubes as the device has room for share it among themselves
//! (`queue.rs`), whether one range retrieves or all do.
//!
//! Scores are logarithms of weights, and bins are equal parts of them below the highest that a
//! weight can be, or below the highest of all. Where a bin holds more than there is room for, that
//! cube orders all scores as it does for short ranges.

mod best;
mod conclude;
mod count;
mod decide;
mod edge;
mod launch;
mod mark;
mod queue;
mod room;
mod score;
mod sums;

use cubecl::prelude::*;

use super::kernel::Blueprint;
use super::marks::WORD;
pub(super) use sums::Sums;
use sums::sums_of;

use crate::select::number_of;

/// Bins of a range's scores.
const BINS: usize = 4_096;
/// Bins of a score's unit: 32 units lie between the first and the last.
const FINENESS: f32 = 128.0;
/// Scores of a bin that the concluding cube orders, by how much shared memory there is, and parts
/// of the bin.
const MOST_CANDIDATES: usize = 1_024;
const FEWEST_CANDIDATES: usize = 256;
const FINER: usize = 256;
/// Slots that are counted and marked together.
const PART: usize = 2_048;
const PART_WORDS: usize = PART / WORD;
/// Of a range's edges, that of the set and that of its best: how many scores are above their bins,
/// and within them.
const EDGES: usize = 4;
const EDGE_WITHIN: usize = 2;

/// Where a range's bins begin: weights are 1 at most, and the first bin has what sums of a group's
/// have beyond; logits have no such bound.
#[cube]
fn highest(part_sums: &[f32], pair: usize, parts: usize, #[comptime] blueprint: Blueprint) -> f32 {
    let mut highest = 0.0f32;
    if comptime!(blueprint.direct()) {
        let sums = sums_of(part_sums, pair, parts, blueprint);
        highest = sums.tops[0];
    }
    highest
}

/// The bin of a score by its bits in order ([`high_of`](crate::select::high_of)), the highest
/// first. NaN is in the last, as it is the lowest.
#[cube]
fn bin_of(key: u32, highest: f32) -> usize {
    let below = (highest - number_of(key)) * FINENESS;
    let mut bin = comptime!(BINS - 1).runtime();
    if key > 0 && below < comptime!((BINS - 1) as f32) {
        bin = max(below, 0.0f32) as usize;
    }
    bin
}

/// The part of a score's bin, the highest first.
#[cube]
fn finer_bin_of(key: u32, highest: f32) -> usize {
    let below = max((highest - number_of(key)) * FINENESS, 0.0f32);
    let mut bin = comptime!(FINER - 1).runtime();
    // What the last bin has beyond its own is in its last part.
    if key > 0 && below < comptime!(BINS as f32) {
        let part = ((below - below.floor()) * comptime!(FINER as f32)) as usize;
        bin = min(part, comptime!(FINER - 1));
    }
    bin
}
