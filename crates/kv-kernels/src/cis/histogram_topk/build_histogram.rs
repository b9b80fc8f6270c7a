//! The histogram of a range's scores.

use cubecl::prelude::*;

use super::log_sums::logs_of;
use super::tasks::{RETRIEVES, run_of};
use super::{BINS, PART, bin_of, top_of_bins};
use crate::cis::bitmask::CHUNK;
use crate::cis::blueprint::Blueprint;
use crate::cis::select_topk::score_of;
use crate::cis::visible_range::load_step_context;
use crate::components::sort_key::sort_key;

/// Writes the sort keys of the scores of ranges that retrieve, and counts them by bins.
///
/// # Shapes
/// As for [`score_kernel`](super::score::score_kernel); `bins` `[P, BINS]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn histogram_kernel(
    lengths: &[i32],
    newest: &[i32],
    table: &[i32],
    tasks: &[u32],
    logits: &[f32],
    ordered: &mut [u32],
    part_sums: &[f32],
    bins: &[Atomic<u32>],
    total_kv_heads: usize,
    kv_heads: usize,
    scored_parts: usize,
    stride: usize,
    block: usize,
    hidden_share: u32,
    #[comptime] most: usize,
    #[comptime] blueprint: Blueprint,
) {
    let (group, units) = comptime!((blueprint.group, blueprint.units));
    let joins = comptime!(!blueprint.direct());
    let parts = stride.div_ceil(PART);
    let mut ranges = Shared::<[u32]>::new_slice(most);
    let run = run_of(tasks, &mut ranges, total_kv_heads, parts, RETRIEVES, blueprint);
    let histogram = Shared::<[Atomic<u32>]>::new_slice(BINS);
    // All parts of a range that are in the run, one range after another.
    let mut next = run.first;
    while next < run.end {
        let range = next / parts;
        let last = min((range + 1) * parts, run.end);
        let kv_head = ranges[range] as usize;
        let position = newest[kv_head / kv_heads];
        let context = load_step_context(
            table,
            kv_head,
            lengths[kv_head],
            position,
            block,
            hidden_share,
            blueprint,
        );
        let visible = &context.visible;
        let top_of_bins = top_of_bins(part_sums, kv_head, scored_parts, blueprint);
        let logs = logs_of(part_sums, kv_head, scored_parts, joins, blueprint);
        // All have emptied those of before.
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
            // Scores in order, or the bits of logits.
            let mut some = Array::<u32>::new(comptime!(CHUNK * group));
            #[unroll]
            for c in 0..CHUNK {
                let at = min(i + c * units, end - 1);
                #[unroll]
                for g in 0..group {
                    some[c * group + g] = if joins {
                        u32::reinterpret(logits[(kv_head * group + g) * stride + at])
                    } else {
                        ordered[kv_head * stride + at]
                    };
                }
            }
            #[unroll]
            for c in 0..CHUNK {
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
                        ordered[kv_head * stride + at] = key;
                    }
                    histogram[bin_of(key, top_of_bins)].fetch_add(1u32);
                }
            }
            i += CHUNK * units;
        }
        sync_cube();
        bin = UNIT_POS as usize;
        while bin < BINS {
            let count = histogram[bin].load();
            if count > 0 {
                bins[kv_head * BINS + bin].fetch_add(count);
            }
            bin += units;
        }
        next = last;
    }
}
