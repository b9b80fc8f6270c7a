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

    // Each plane has neighbouring scores, so that the counts of the planes before it say where it
    // writes. Its units have neighbouring vectors.
    let (lane, width) = (UNIT_POS_PLANE as usize, PLANE_DIM as usize);
    let (plane, planes) = (unit / width, units / width);
    let rounds = columns.div_ceil(units);
    let first = plane * rounds * width + lane;
    let mut own = 0u32;
    for round in 0..rounds {
        let at = first + round * width;
        if at < columns {
            let vector = asked.scores[start + at];
            #[unroll]
            for lane in 0..N::value() {
                let index = at * N::value() + lane;
                let stays = index < length
                    && not_below(sort_key(vector.extract(lane)), index_key(index), high, low);
                own += select(stays, 1u32, 0u32);
            }
        }
    }
    if wanted == 0 {
        own = 0u32;
    }
    let mut parts = Shared::<[u32]>::new_slice(comptime!(search.planes));
    let kept = plane_sum(own);
    if lane == 0 {
        parts[plane] = kept;
    }
    sync_cube();
    let mut to = 0u32;
    let mut total = 0u32;
    for other in 0..planes {
        let count = parts[other];
        to += select(other < plane, count, 0u32);
        total += count;
    }
    let total = min(total as usize, most);
    if kept > 0 {
        for round in 0..rounds {
            let at = first + round * width;
            // A bit a number.
            let mut stay = 0u32;
            if at < columns {
                let vector = asked.scores[start + at];
                #[unroll]
                for lane in 0..N::value() {
                    let index = at * N::value() + lane;
                    let stays = index < length
                        && not_below(sort_key(vector.extract(lane)), index_key(index), high, low);
                    stay |= select(stays, comptime!(1u32 << lane), 0u32);
                }
            }
            let own = stay.count_ones();
            let mut next = (to + plane_exclusive_sum(own)) as usize;
            to += plane_sum(own);
            #[unroll]
            for lane in 0..N::value() {
                if stay & comptime!(1u32 << lane) != 0 && next < most {
                    chosen.indices[row * most + next] = i32::cast_from(at * N::value() + lane);
                    next += 1;
                }
            }
        }
    }
    let mut free = total + unit;
    while free < most {
        chosen.indices[row * most + free] = i32::new(NO_SLOT as i64);
        free += units;
    }
    if unit == 0 {
        chosen.found[row] = i32::cast_from(total);
    }
}
