//! The CubeCL kernel, one cube a row: see [`crate::select`].

use cubecl::prelude::*;

use crate::components::sort_key::{index_key, not_below, sort_key};
use crate::components::top_k::{STEPS, Search, threshold};

/// What is chosen of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Rule {
    /// The highest scores.
    Top,
    /// All scores from a bound on.
    Above,
}

/// Units whose counts are summed together.
const GROUP: usize = 32;

/// # Shapes
/// `scores` `[R, columns]` in vectors; `lengths`, `counts` (of [`Rule::Top`]), `bounds` (of
/// [`Rule::Above`]) and `found` `[R]`; `indices` `[R, most]`.
#[cube(launch_unchecked)]
pub(crate) fn top_slots_kernel<N: Size>(
    scores: &[Vector<f32, N>],
    lengths: &[i32],
    counts: &[i32],
    bounds: &[f32],
    indices: &mut [i32],
    found: &mut [i32],
    rows: usize,
    columns: usize,
    most: usize,
    #[comptime] rule: Rule,
    #[comptime] search: Search,
) {
    let row = CUBE_POS;
    if row >= rows {
        terminate!();
    }
    let units = search.units.comptime();
    let unit = UNIT_POS as usize;
    let start = row * columns;
    let length = lengths[row] as usize;
    let mut high = sort_key(bounds[row]);
    let mut low = 0u32;
    let mut wanted = 1u32;
    if comptime!(rule == Rule::Top) {
        let mut parts = Shared::<[f32]>::new_slice(comptime!(STEPS * search.planes));
        let mut totals = Shared::<[f32]>::new_slice(STEPS);
        wanted = u32::cast_from(min(counts[row] as usize, most));
        let place = threshold(
            scores,
            &mut parts,
            &mut totals,
            start,
            columns,
            length,
            0.0f32,
            1.0f32,
            f32::cast_from(wanted),
            0u32,
            0u32,
            search,
        );
        high = place.extract(0usize);
        low = place.extract(1usize);
    } else if u32::reinterpret(bounds[row]) & 0x7fff_ffffu32 > 0x7f80_0000u32 {
        // Nothing is from NaN on.
        wanted = 0u32;
    }

    // Units have neighbouring scores: how many each keeps says where it writes.
    let segment = columns.div_ceil(units);
    let first = min(unit * segment, columns);
    let last = min(first + segment, columns);
    let mut kept = 0u32;
    for at in first..last {
        let vector = scores[start + at];
        #[unroll]
        for lane in 0..N::value() {
            let index = at * N::value() + lane;
            let stays = index < length
                && not_below(sort_key(vector.extract(lane)), index_key(index), high, low);
            kept += select(stays, 1u32, 0u32);
        }
    }
    if wanted == 0 {
        kept = 0u32;
    }
    let mut own = Shared::<[u32]>::new_slice(units);
    let mut groups = Shared::<[u32]>::new_slice(comptime!(units.div_ceil(GROUP)));
    own[unit] = kept;
    sync_cube();
    if unit < comptime!(units.div_ceil(GROUP)) {
        let mut sum = 0u32;
        for i in 0..comptime!(GROUP.min(units)) {
            sum += own[unit * GROUP + i];
        }
        groups[unit] = sum;
    }
    sync_cube();
    let mut before = 0u32;
    for group in 0..unit / GROUP {
        before += groups[group];
    }
    for i in unit / GROUP * GROUP..unit {
        before += own[i];
    }
    let mut to = before as usize;
    if kept > 0 {
        for at in first..last {
            let vector = scores[start + at];
            #[unroll]
            for lane in 0..N::value() {
                let index = at * N::value() + lane;
                let stays = index < length
                    && not_below(sort_key(vector.extract(lane)), index_key(index), high, low);
                if stays && to < most {
                    indices[row * most + to] = i32::cast_from(index);
                    to += 1;
                }
            }
        }
    }
    // The last unit knows how many there are; all mark what stays free.
    sync_cube();
    if unit == comptime!(units - 1) {
        groups[0] = before + kept;
    }
    sync_cube();
    let total = min(groups[0] as usize, most);
    let mut free = total + unit;
    while free < most {
        indices[row * most + free] = i32::new(-1);
        free += units;
    }
    if unit == 0 {
        found[row] = i32::cast_from(total);
    }
}
