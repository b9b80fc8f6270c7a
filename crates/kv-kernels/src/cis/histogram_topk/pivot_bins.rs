//! The bins of the k-th highest scores.

use cubecl::prelude::*;

use crate::cis::blueprint::Blueprint;

/// What is found: the bin, and how many scores are in bins above it, and within it.
pub(super) const BIN: usize = 0;
pub(super) const ABOVE: usize = 1;
pub(super) const WITHIN: usize = 2;
pub(super) const FOUND: usize = 3;

/// Searches for bins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Searches {
    /// Bins, of which the first hold the highest scores.
    pub(super) bins: usize,
    /// How many searches there are.
    pub(super) count: usize,
    /// Where their results begin.
    pub(super) to: usize,
}

/// Finds, for each number of `most`, the bin of the score of that rank among the bins from `base`
/// on, and writes it to `found`, one behind another.
#[cube]
pub(super) fn find_pivot_bins(
    bins: &[Atomic<u32>],
    base: usize,
    most: &Array<u32>,
    found: &mut Shared<[u32]>,
    #[comptime] searches: Searches,
    #[comptime] blueprint: Blueprint,
) {
    let Searches { bins: many, count, to } = searches;
    let units = blueprint.units.comptime();
    let each = comptime!(many.div_ceil(units));
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    let mut sums = Shared::<[u32]>::new_slice(comptime!(blueprint.planes()));
    let mut own = 0u32;
    let first = plane * each * PLANE_DIM as usize;
    #[unroll]
    for b in 0..each {
        let bin = first + b * PLANE_DIM as usize + UNIT_POS_PLANE as usize;
        if bin < many {
            own += bins[base + bin].load();
        }
    }
    let all = plane_sum(own);
    // All have read those of before.
    sync_cube();
    if UNIT_POS_PLANE == 0 {
        sums[plane] = all;
    }
    sync_cube();
    let mut before = 0u32;
    for other in 0..plane {
        before += sums[other];
    }
    let mut here = false;
    #[unroll]
    for search in 0..count {
        here = here || (before < most[search] && before + all >= most[search]);
    }
    // The few planes that have an edge look again, now at neighbours in each unit.
    if here {
        let first = first + UNIT_POS_PLANE as usize * each;
        let mut counts = Array::<u32>::new(each);
        own = 0u32;
        #[unroll]
        for b in 0..each {
            counts[b] = 0u32;
            if first + b < many {
                counts[b] = bins[base + first + b].load();
            }
            own += counts[b];
        }
        let mut above = before + plane_exclusive_sum(own);
        #[unroll]
        for b in 0..each {
            #[unroll]
            for search in 0..count {
                if above < most[search] && above + counts[b] >= most[search] {
                    let at = comptime!(to + search * FOUND);
                    found[at + BIN] = (first + b) as u32;
                    found[at + ABOVE] = above;
                    found[at + WITHIN] = counts[b];
                }
            }
            above += counts[b];
        }
    }
}
