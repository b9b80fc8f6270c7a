//! Radix selection: finds the `k_top`-th and the `k_dilate`-th highest sort key of a range digit by
//! digit, with histograms in shared memory. One cube does it, so it serves short ranges;
//! `histogram_topk/` serves long ones.

use cubecl::prelude::*;

use super::blueprint::Blueprint;

/// Bins of a digit of 8 bits.
pub(super) const BINS: usize = 256;

/// The k-th highest key, how many keys are greater, and how many equal it.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Pivot {
    pub(super) key: u32,
    pub(super) n_greater: u32,
    pub(super) n_equal: u32,
}

/// The pivots of the `k_top` highest and of the `k_dilate` highest keys, among the keys from
/// `first` to before `end`. There must be at least as many keys.
#[cube]
pub(super) fn find_pivots(
    keys: &[u32],
    base: usize,
    first: usize,
    end: usize,
    k_top: u32,
    k_dilate: u32,
    #[comptime] blueprint: Blueprint,
) -> (Pivot, Pivot) {
    let (units, planes) = comptime!((blueprint.units, blueprint.planes()));
    let chunk = blueprint.chunk.comptime();
    // Neighbouring bins that a unit sums.
    let each = comptime!(BINS.div_ceil(units));
    let bins = Shared::<[Atomic<u32>]>::new_slice(comptime!(2 * BINS));
    let mut found = Shared::<[u32]>::new_slice(6usize);
    let mut parts = Shared::<[u32]>::new_slice(comptime!(2 * planes));
    let mut prefixes = Array::<u32>::new(2usize);
    let mut left = Array::<u32>::new(2usize);
    let mut above = Array::<u32>::new(2usize);
    let mut equal = Array::<u32>::new(2usize);
    prefixes[0] = 0u32;
    prefixes[1] = 0u32;
    left[0] = k_top;
    left[1] = k_dilate;
    #[unroll]
    for search in 0..2usize {
        above[search] = 0u32;
        equal[search] = 0u32;
    }
    let unit = UNIT_POS as usize;
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    for digit in 0..4u32 {
        let shift = 24u32 - 8u32 * digit;
        // No digit is known yet, so one histogram serves both pivots.
        let whole = digit == 0;
        let mut i = unit;
        while i < comptime!(2 * BINS) {
            bins[i].store(0u32);
            i += units;
        }
        sync_cube();
        i = first + unit;
        while i < end {
            let mut some = Array::<u32>::new(chunk);
            #[unroll]
            for c in 0..chunk {
                some[c] = keys[base + min(i + c * units, end - 1)];
            }
            #[unroll]
            for c in 0..chunk {
                if i + c * units < end {
                    let bin = ((some[c] >> shift) & 255u32) as usize;
                    // Two shifts, since a shift by 32 bits would shift by none.
                    let head = (some[c] >> shift) >> 8u32;
                    if head == prefixes[0] {
                        bins[bin].fetch_add(1u32);
                    }
                    if !whole && head == prefixes[1] {
                        bins[BINS + bin].fetch_add(1u32);
                    }
                }
            }
            i += chunk * units;
        }
        sync_cube();
        // The first unit has the highest bins.
        let mut held = Array::<u32>::new(comptime!(2 * each));
        let mut before = Array::<u32>::new(2usize);
        #[unroll]
        for search in 0..2usize {
            let histogram = select(whole, 0usize, comptime!(search * BINS));
            let mut own = 0u32;
            #[unroll]
            for bin in 0..each {
                let at = unit * each + bin;
                let mut count = 0u32;
                if at < BINS {
                    count = bins[histogram + BINS - 1 - at].load();
                }
                held[search * each + bin] = count;
                own += count;
            }
            before[search] = plane_exclusive_sum(own);
            let all = plane_sum(own);
            if UNIT_POS_PLANE == 0 {
                parts[search * planes + plane] = all;
            }
        }
        sync_cube();
        #[unroll]
        for search in 0..2usize {
            for other in 0..plane {
                before[search] += parts[search * planes + other];
            }
            #[unroll]
            for bin in 0..each {
                let count = held[search * each + bin];
                let above = before[search];
                if above < left[search] && above + count >= left[search] {
                    found[3 * search] = (BINS - 1 - unit * each - bin) as u32;
                    found[3 * search + 1] = above;
                    found[3 * search + 2] = count;
                }
                before[search] = above + count;
            }
        }
        sync_cube();
        #[unroll]
        for search in 0..2usize {
            prefixes[search] = (prefixes[search] << 8u32) | found[3 * search];
            above[search] += found[3 * search + 1];
            left[search] -= found[3 * search + 1];
            equal[search] = found[3 * search + 2];
        }
    }
    let pivot_top = Pivot { key: prefixes[0], n_greater: above[0], n_equal: equal[0] };
    let pivot_dilate = Pivot { key: prefixes[1], n_greater: above[1], n_equal: equal[1] };
    (pivot_top, pivot_dilate)
}
