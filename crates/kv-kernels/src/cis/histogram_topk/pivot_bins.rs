//! Finds the bins that hold the k-th highest scores, from a histogram.

use cubecl::prelude::*;

use crate::cis::blueprint::Blueprint;

/// Results of a search: the bin, how many scores are in higher bins, and how many are in the bin.
pub(super) const BIN: usize = 0;
pub(super) const ABOVE: usize = 1;
pub(super) const WITHIN: usize = 2;
pub(super) const FOUND: usize = 3;

/// The comptime shape of searches in one histogram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Searches {
    /// Bins of the histogram. The first bins hold the highest scores.
    pub(super) bins: usize,
    /// How many searches there are.
    pub(super) count: usize,
    /// Where the results begin in `found`.
    pub(super) to: usize,
}

/// For each rank `k` in `most`, finds the bin of the k-th highest score among the bins from `base`
/// on, and writes it to `found`.
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
    // All units have read the previous sums.
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
    // Only the few planes whose bins contain a rank read their bins again, now neighbouring bins in
    // each unit.
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
