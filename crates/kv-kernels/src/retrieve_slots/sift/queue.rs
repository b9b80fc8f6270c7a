//! What there is to do: parts of the ranges of which something is to be done, in runs, one a cube.

use cubecl::prelude::*;

use crate::retrieve_slots::kernel::Blueprint;

/// What is to be done of a range: to score it, and to retrieve a set.
pub(super) const SCORES: u32 = 1;
pub(super) const RETRIEVES: u32 = 2;

/// A cube's run of parts, counted over all ranges of which something is to be done.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Run {
    pub(super) first: usize,
    pub(super) end: usize,
}

/// Lists the ranges of which `task` is to be done; returns the cube's share of their parts.
///
/// # Shapes
/// `tasks` `[P]`; `ranges` has room for `P`.
#[cube]
pub(super) fn run_of(
    tasks: &[u32],
    ranges: &mut Shared<[u32]>,
    pairs: usize,
    parts: usize,
    #[comptime] task: u32,
    #[comptime] blueprint: Blueprint,
) -> Run {
    let units = blueprint.units.comptime();
    let mut sums = Shared::<[u32]>::new_slice(comptime!(blueprint.planes()));
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    let mut known = 0usize;
    for round in 0..pairs.div_ceil(units) {
        let pair = round * units + UNIT_POS as usize;
        let mut due = 0u32;
        if pair < pairs {
            due = select(tasks[pair] & task > 0, 1u32, 0u32);
        }
        let before = plane_exclusive_sum(due);
        let all = plane_sum(due);
        // All have read those of before.
        sync_cube();
        if UNIT_POS_PLANE == 0 {
            sums[plane] = all;
        }
        sync_cube();
        // Most planes have no range.
        let some = min(pairs - round * units, units).div_ceil(PLANE_DIM as usize);
        let mut at = known + before as usize;
        for other in 0..some {
            let sum = sums[other] as usize;
            at += select(other < plane, sum, 0usize);
            known += sum;
        }
        if due > 0 {
            ranges[at] = pair as u32;
        }
    }
    sync_cube();
    let all = known * parts;
    let share = all.div_ceil(CUBE_COUNT);
    let first = min(CUBE_POS * share, all);
    Run { first, end: min(first + share, all) }
}
