//! Long ranges: many cubes count a range's scores by bins and mark those above an edge's, so that the cube that
//! concludes has but the scores of one bin to order.
//!
//! Scores are logarithms of weights, and bins are equal parts of them below the highest that a weight can be, or below
//! the highest of all. Where a bin holds more than there is room for, that cube orders all scores as it does for short
//! ranges.

mod conclude;
mod count;
mod launch;
mod mark;
mod sums;

use cubecl::prelude::*;

use super::kernel::Blueprint;
use super::launch::PART;
use super::marks::WORD;
pub(super) use launch::Sieve;
pub(super) use sums::{Sums, join_teams};

/// Bins of a range's scores.
const BINS: usize = 4_096;
/// Bins of a score's unit: 32 units lie between the first and the last.
const FINENESS: f32 = 128.0;
/// Scores of a bin that the concluding cube orders.
const CANDIDATES: usize = 1_024;
/// Words of marks of a part of a range, at most: its slots may begin and end within words.
const PART_WORDS: usize = PART / WORD + 1;
/// Tallies of a range: candidates for the set and for its best, and what is above them.
const TALLIES: usize = 4;

/// Where bins begin: weights are 1 at most; logits have no such bound.
#[cube]
fn highest(sums: &Sums, #[comptime] blueprint: Blueprint) -> f32 {
    let mut highest = 0.0f32;
    if comptime!(blueprint.direct()) {
        highest = sums.tops[0];
    }
    highest
}

/// A score's bin, the highest first. NaN is in the last, as it is the lowest.
#[cube]
fn bin_of(score: f32, highest: f32) -> usize {
    let below = (highest - score) * FINENESS;
    let mut bin = comptime!(BINS - 1).runtime();
    if below < comptime!((BINS - 1) as f32) {
        bin = max(below, 0.0f32) as usize;
    }
    bin
}

/// Empties a range's bins and tallies, by the cubes of its parts.
#[cube]
pub(in crate::retrieve_slots) fn clear(
    bins: &[Atomic<u32>],
    tallies: &[Atomic<u32>],
    pair: usize,
    split: usize,
    splits: usize,
    #[comptime] units: usize,
) {
    let mut bin = split * units + UNIT_POS as usize;
    while bin < BINS {
        bins[pair * BINS + bin].store(0u32);
        bin += splits * units;
    }
    if split == 0 && (UNIT_POS as usize) < TALLIES {
        tallies[pair * TALLIES + UNIT_POS as usize].store(0u32);
    }
}
