//! The bin of the last of the highest scores.

use cubecl::prelude::*;

use crate::retrieve_slots::radix::{PLANES, exclusive};

/// What is found: the bin, and how many scores are in bins above it, and within it.
pub(super) const BIN: usize = 0;
pub(super) const ABOVE: usize = 1;
pub(super) const WITHIN: usize = 2;
pub(super) const FOUND: usize = 3;

/// Finds the bin of the last of the `most` highest, of so `many` bins from `base` on, and writes to `found` from `to` on;
/// the highest scores are in the first.
#[cube]
pub(super) fn find_edge(
    bins: &[Atomic<u32>],
    base: usize,
    #[comptime] many: usize,
    most: u32,
    found: &mut Shared<[u32]>,
    #[comptime] to: usize,
    #[comptime] units: usize,
) {
    // A unit's bins are neighbours.
    let each = comptime!(many.div_ceil(units));
    let unit = UNIT_POS as usize;
    let mut parts = Shared::<[u32]>::new_slice(PLANES);
    let mut counts = Array::<u32>::new(each);
    let mut own = 0u32;
    #[unroll]
    for b in 0..each {
        let bin = unit * each + b;
        counts[b] = 0u32;
        if bin < many {
            counts[b] = bins[base + bin].load();
        }
        own += counts[b];
    }
    let (before, _) = exclusive(own, &mut parts);
    let mut before = before;
    #[unroll]
    for b in 0..each {
        let after = before + counts[b];
        if before < most && after >= most {
            found[to + BIN] = (unit * each + b) as u32;
            found[to + ABOVE] = before;
            found[to + WITHIN] = counts[b];
        }
        before = after;
    }
}
