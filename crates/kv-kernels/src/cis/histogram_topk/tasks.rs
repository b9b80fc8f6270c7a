//! Work lists: the parts of all ranges that have a task, divided among the cubes.

use cubecl::prelude::*;

use super::kernel_args::DueRanges;
use crate::cis::blueprint::Blueprint;

/// Tasks of a range, one bit each: to score it, and to retrieve its set.
pub(super) const TO_SCORE: u32 = 1;
pub(super) const TO_RETRIEVE: u32 = 2;

/// The parts that a cube takes, numbered over all ranges that have the task.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Run {
    pub(super) first: usize,
    pub(super) end: usize,
}

/// Lists the ranges that have `task`, and returns the cube's run of their parts.
///
/// # Shapes
/// `ranges` has room for `P`.
#[cube]
pub(super) fn run_of(
    due: &DueRanges,
    ranges: &mut Shared<[u32]>,
    parts: usize,
    #[comptime] task: u32,
    #[comptime] blueprint: Blueprint,
) -> Run {
    let units = blueprint.units.comptime();
    let mut sums = Shared::<[u32]>::new_slice(comptime!(blueprint.planes()));
    let total_kv_heads = due.ranges.total_kv_heads;
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    let mut known = 0usize;
    for round in 0..total_kv_heads.div_ceil(units) {
        let kv_head = round * units + UNIT_POS as usize;
        let mut listed = 0u32;
        if kv_head < total_kv_heads {
            listed = select(due.tasks[kv_head] & task > 0, 1u32, 0u32);
        }
        let before = plane_exclusive_sum(listed);
        let all = plane_sum(listed);
        // All units have read the previous sums.
        sync_cube();
        if UNIT_POS_PLANE == 0 {
            sums[plane] = all;
        }
        sync_cube();
        // Planes beyond the last range have nothing listed.
        let some = min(total_kv_heads - round * units, units).div_ceil(PLANE_DIM as usize);
        let mut at = known + before as usize;
        for other in 0..some {
            let sum = sums[other] as usize;
            at += select(other < plane, sum, 0usize);
            known += sum;
        }
        if listed > 0 {
            ranges[at] = kv_head as u32;
        }
    }
    sync_cube();
    let all = known * parts;
    let share = all.div_ceil(CUBE_COUNT);
    let first = min(CUBE_POS * share, all);
    Run { first, end: min(first + share, all) }
}
