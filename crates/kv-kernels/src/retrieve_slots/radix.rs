//! The highest of a range's scores, found digit by digit in their bits, with histograms in shared memory.

use cubecl::prelude::*;

/// Bins of a digit of 11 bits.
pub(super) const BINS: usize = 2048;
/// Numbers of shared memory that [`exclusive`] takes, at least as many as planes of a cube.
pub(super) const PLANES: usize = 128;

/// The lowest of the highest scores, and how many scores are above it.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Edge {
    pub(super) key: u32,
    pub(super) above: u32,
}

/// The edges of the `wanted` and of the `fewer` highest of the keys from `first` to `end`, of which there are as
/// many, at least.
#[cube]
pub(super) fn edges(
    keys: &[u32],
    base: usize,
    first: usize,
    end: usize,
    wanted: u32,
    fewer: u32,
    #[comptime] units: usize,
) -> (Edge, Edge) {
    let bins = Shared::<[Atomic<u32>]>::new_slice(comptime!(2 * BINS));
    let mut found = Shared::<[u32]>::new_slice(4usize);
    let mut parts = Shared::<[u32]>::new_slice(PLANES);
    let mut prefixes = Array::<u32>::new(2usize);
    let mut left = Array::<u32>::new(2usize);
    let mut above = Array::<u32>::new(2usize);
    prefixes[0] = 0u32;
    prefixes[1] = 0u32;
    left[0] = wanted;
    left[1] = fewer;
    above[0] = 0u32;
    above[1] = 0u32;
    let unit = UNIT_POS as usize;
    #[unroll]
    for digit in 0..3u32 {
        // 11, 11 and 10 bits.
        let shift = comptime!([21u32, 10, 0][digit as usize]);
        let count = comptime!(if digit == 2 { BINS / 2 } else { BINS });
        let mut i = unit;
        while i < comptime!(2 * BINS) {
            bins[i].store(0u32);
            i += units;
        }
        sync_cube();
        i = first + unit;
        while i < end {
            let key = keys[base + i];
            let bin = ((key >> shift) & comptime!(count as u32 - 1)) as usize;
            if comptime!(digit == 0) {
                bins[bin].fetch_add(1u32);
            } else {
                let head = key >> comptime!(if digit == 1 { 21u32 } else { 10 });
                if head == prefixes[0] {
                    bins[bin].fetch_add(1u32);
                }
                if head == prefixes[1] {
                    bins[BINS + bin].fetch_add(1u32);
                }
            }
            i += units;
        }
        sync_cube();
        #[unroll]
        for search in 0..2usize {
            let histogram = comptime!(if digit == 0 { 0 } else { search * BINS });
            // Units have neighbouring bins, the first unit the highest.
            let each = comptime!(count.div_ceil(units));
            let mut own = 0u32;
            let mut next = unit * each;
            while next < min((unit + 1) * each, count) {
                own += bins[histogram + count - 1 - next].load();
                next += 1;
            }
            let (before, _) = exclusive(own, &mut parts);
            let mut higher = before;
            next = unit * each;
            while next < min((unit + 1) * each, count) {
                let bin = count - 1 - next;
                let held = bins[histogram + bin].load();
                if higher < left[search] && higher + held >= left[search] {
                    found[2 * search] = bin as u32;
                    found[2 * search + 1] = higher;
                }
                higher += held;
                next += 1;
            }
        }
        sync_cube();
        #[unroll]
        for search in 0..2usize {
            let bits = comptime!(if digit == 2 { 10u32 } else { 11 });
            prefixes[search] = (prefixes[search] << bits) | found[2 * search];
            above[search] += found[2 * search + 1];
            left[search] -= found[2 * search + 1];
        }
        sync_cube();
    }
    (Edge { key: prefixes[0], above: above[0] }, Edge { key: prefixes[1], above: above[1] })
}

/// The sum over all units before this one, and over all.
#[cube]
pub(super) fn exclusive(value: u32, parts: &mut Shared<[u32]>) -> (u32, u32) {
    let own = plane_exclusive_sum(value);
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    let all = plane_sum(value);
    // Those who read the last sums are through.
    sync_cube();
    if UNIT_POS_PLANE == 0 {
        parts[plane] = all;
    }
    sync_cube();
    let mut before = own;
    let mut total = 0u32;
    for other in 0..(CUBE_DIM / PLANE_DIM) as usize {
        let sum = parts[other];
        before += select(other < plane, sum, 0u32);
        total += sum;
    }
    (before, total)
}
