//! The second kernel: logits of the ranges that retrieve, or of all ranges where they are measured.

use cubecl::prelude::*;

use super::BINS;
use super::kernel_args::{DueRanges, PartScores, Room, ScoreCounts};
use super::log_sums::write_sums;
use super::tasks::{TO_SCORE, run_of};
use crate::cis::blueprint::Blueprint;
use crate::cis::kernel_args::ScoredKeys;
use crate::cis::log_sums::Sums;
use crate::cis::score::{ScoreShare, score_split};
use crate::cis::visible_range::load_step_context;

/// Scores each range in `parts` parts, and sums the exponentials of each part's logits. Also zeroes
/// the ranges' bins and tallies for the next kernels.
#[cube(launch_unchecked)]
pub(super) fn score_kernel<F: Float, N: Size>(
    keys: &ScoredKeys<F, N>,
    due: &DueRanges,
    scored: &mut PartScores,
    counts: &ScoreCounts,
    #[comptime] room: Room,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let parts = scored.parts;
    let mut ranges = Shared::<[u32]>::new_slice(room.ranges);
    let run = run_of(due, &mut ranges, parts, TO_SCORE, blueprint);
    for item in run.first..run.end {
        let (kv_head, part) = (ranges[item / parts] as usize, item % parts);
        let position = due.ranges.newest[kv_head / due.ranges.kv_heads];
        let length = due.ranges.lengths[kv_head];
        let context = load_step_context(&due.ranges, kv_head, length, position, blueprint);
        let mut bin = part * blueprint.units.comptime() + UNIT_POS as usize;
        while bin < BINS {
            counts.bins[kv_head * BINS + bin].store(0u32);
            bin += parts * blueprint.units.comptime();
        }
        if part == 0 && UNIT_POS < 2 {
            counts.tallies[2 * kv_head + UNIT_POS as usize].store(0u32);
        }
        let mut sums = Sums::none(comptime!(blueprint.held()));
        let stride = scored.scores.stride;
        let share = ScoreShare {
            kv_head,
            offset: due.ranges.offsets[kv_head] as usize,
            split: part,
            splits: parts,
            base: kv_head * stride,
            stride,
        };
        score_split::<F, N>(
            keys,
            &mut scored.scores.logits,
            &mut scored.scores.ordered,
            &mut sums,
            &share,
            &context.visible,
            blueprint,
        );
        write_sums(&sums, &mut scored.part_sums, kv_head * parts + part, blueprint);
    }
}
