//! The histogram of a range's scores: how many scores are in each of [`BINS`] bins. Cubes that
//! share a range add their counts. From the counts, `write_bitmask.rs` finds the bin of the k-th
//! highest score without a sort.

use cubecl::prelude::*;

use super::kernel_args::{DueRanges, PartScores, Room, ScoreCounts};
use super::log_sums::logs_of;
use super::tasks::{TO_RETRIEVE, run_of};
use super::{BINS, PART, bin_of, top_of_bins};
use crate::cis::blueprint::Blueprint;
use crate::cis::select_topk::score_of;
use crate::cis::visible_range::load_step_context;
use crate::components::sort_key::sort_key;

/// Makes the sort keys of the ranges that retrieve, and counts them by bins.
#[cube(launch_unchecked)]
pub(super) fn histogram_kernel(
    due: &DueRanges,
    scored: &mut PartScores,
    counts: &ScoreCounts,
    #[comptime] room: Room,
    #[comptime] blueprint: Blueprint,
) {
    let (group, units) = comptime!((blueprint.group, blueprint.units));
    let chunk = blueprint.chunk.comptime();
    let joins = comptime!(!blueprint.direct());
    let (stride, scored_parts) = (scored.scores.stride, scored.parts);
    let parts = stride.div_ceil(PART);
    let mut ranges = Shared::<[u32]>::new_slice(room.ranges);
    let run = run_of(due, &mut ranges, parts, TO_RETRIEVE, blueprint);
    let histogram = Shared::<[Atomic<u32>]>::new_slice(BINS);
    // For each range in turn, takes all its parts that are in this cube's run.
    let mut next = run.first;
    while next < run.end {
        let range = next / parts;
        let last = min((range + 1) * parts, run.end);
        let kv_head = ranges[range] as usize;
        let position = due.ranges.newest[kv_head / due.ranges.kv_heads];
        let length = due.ranges.lengths[kv_head];
        let context = load_step_context(&due.ranges, kv_head, length, position, blueprint);
        let visible = &context.visible;
        let top_of_bins = top_of_bins(&scored.part_sums, kv_head, scored_parts, blueprint);
        let logs = logs_of(&scored.part_sums, kv_head, scored_parts, joins, blueprint);
        // All units have read the previous range's counts.
        sync_cube();
        let mut bin = UNIT_POS as usize;
        while bin < BINS {
            histogram[bin].store(0u32);
            bin += units;
        }
        sync_cube();
        let end = min((last - range * parts) * PART, visible.local);
        let mut i = max((next - range * parts) * PART, visible.start) + UNIT_POS as usize;
        while i < end {
            // Sort keys, or logits as bits.
            let mut some = Array::<u32>::new(comptime!(chunk * group));
            #[unroll]
            for c in 0..chunk {
                let at = min(i + c * units, end - 1);
                #[unroll]
                for g in 0..group {
                    some[c * group + g] = if joins {
                        u32::reinterpret(scored.scores.logits[(kv_head * group + g) * stride + at])
                    } else {
                        scored.scores.ordered[kv_head * stride + at]
                    };
                }
            }
            #[unroll]
            for c in 0..chunk {
                let at = i + c * units;
                if at < end {
                    let mut key = some[c * group];
                    if joins {
                        let mut own = Array::<f32>::new(group);
                        #[unroll]
                        for g in 0..group {
                            own[g] = f32::reinterpret(some[c * group + g]);
                        }
                        key = sort_key(score_of(&own, &logs, blueprint));
                        scored.scores.ordered[kv_head * stride + at] = key;
                    }
                    histogram[bin_of(key, top_of_bins)].fetch_add(1u32);
                }
            }
            i += chunk * units;
        }
        sync_cube();
        bin = UNIT_POS as usize;
        while bin < BINS {
            let count = histogram[bin].load();
            if count > 0 {
                counts.bins[kv_head * BINS + bin].fetch_add(count);
            }
            bin += units;
        }
        next = last;
    }
}
