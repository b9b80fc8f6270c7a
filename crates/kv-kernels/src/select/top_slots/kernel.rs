//! The kernel of `top_slots`, with one cube a row. It finds the lowest chosen score by radix select
//! (`components/top_k.rs`) and then lists all scores from it on, so that nothing is sorted.

use cubecl::prelude::*;

use crate::components::sentinels::NO_SLOT;
use crate::components::sort_key::{index_key, not_below, sort_key};
use crate::components::top_k::{Counts, Place, RankedRow, Search, threshold};

/// The rule by which scores of a row are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Rule {
    /// The highest scores.
    Top,
    /// All scores from a bound on.
    Above,
}

/// Units whose counts are summed together.
const GROUP: usize = 32;

/// Rows of scores, and how many of each row, or from which score on, are wanted.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct WantedRows<N: Size> {
    /// `[R, columns]`, in vectors of `N`.
    scores: Box<[Vector<f32, N>]>,
    /// Candidates of each row, `[R]`.
    lengths: Box<[i32]>,
    /// How many scores are wanted, `[R]`, for [`Rule::Top`].
    counts: Box<[i32]>,
    /// The lowest wanted score, `[R]`, for [`Rule::Above`].
    bounds: Box<[f32]>,
    /// `R`
    rows: usize,
    /// Vectors of a row.
    columns: usize,
}

/// The chosen indices.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ChosenSlots {
    /// Ascending indices, `[R, most]`, with [`NO_SLOT`] after the last.
    indices: Box<[i32]>,
    /// How many indices each row has, `[R]`.
    found: Box<[i32]>,
    /// The most indices of a row.
    most: usize,
}

/// Chooses scores by one cube a row.
#[cube(launch_unchecked)]
pub(crate) fn top_slots_kernel<N: Size>(
    asked: &WantedRows<N>,
    chosen: &mut ChosenSlots,
    #[comptime] rule: Rule,
    #[comptime] search: Search,
) {
    let row = CUBE_POS;
    if row >= asked.rows {
        terminate!();
    }
    let units = search.units.comptime();
    let unit = UNIT_POS as usize;
    let (columns, most) = (asked.columns, chosen.most);
    let start = row * columns;
    let length = asked.lengths[row] as usize;
    let mut high = sort_key(asked.bounds[row]);
    let mut low = 0u32;
    let mut wanted = 1u32;
    if comptime!(rule == Rule::Top) {
        let mut counted = Counts::room(search.planes);
        wanted = u32::cast_from(min(asked.counts[row] as usize, most));
        let ranked = RankedRow { start, columns, length, max: 0.0f32, temperature: 1.0f32 };
        let floor = Place { high: 0u32, low: 0u32 };
        let wanted = f32::cast_from(wanted);
        let place = threshold(&asked.scores, &mut counted, &ranked, wanted, &floor, search);
        high = place.high;
        low = place.low;
    } else if u32::reinterpret(asked.bounds[row]) & 0x7fff_ffffu32 > 0x7f80_0000u32 {
        // A bound of NaN admits no score.
        wanted = 0u32;
    }

    // Each unit has neighbouring scores, so that the counts of the units before it say where it
    // writes.
    let segment = columns.div_ceil(units);
    let first = min(unit * segment, columns);
    let last = min(first + segment, columns);
    let mut kept = 0u32;
    for at in first..last {
        let vector = asked.scores[start + at];
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
            let vector = asked.scores[start + at];
            #[unroll]
            for lane in 0..N::value() {
                let index = at * N::value() + lane;
                let stays = index < length
                    && not_below(sort_key(vector.extract(lane)), index_key(index), high, low);
                if stays && to < most {
                    chosen.indices[row * most + to] = i32::cast_from(index);
                    to += 1;
                }
            }
        }
    }
    // The last unit knows the total; all units mark the free places.
    sync_cube();
    if unit == comptime!(units - 1) {
        groups[0] = before + kept;
    }
    sync_cube();
    let total = min(groups[0] as usize, most);
    let mut free = total + unit;
    while free < most {
        chosen.indices[row * most + free] = i32::new(NO_SLOT as i64);
        free += units;
    }
    if unit == 0 {
        chosen.found[row] = i32::cast_from(total);
    }
}
