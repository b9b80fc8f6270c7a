//! Scores of a range, ordered and counted by bins.

use cubecl::prelude::*;

use super::sums::logs_of;
use super::{BINS, bin_of, highest};
use crate::retrieve_slots::choose::score_of;
use crate::retrieve_slots::decide::outset_of;
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::marks::CHUNK;
use crate::retrieve_slots::table::{DECIDED, RETRIEVES};
use crate::select::high_of;

/// Orders the scores of ranges that retrieve, and counts them by bins.
///
/// # Shapes
/// As for [`step`](crate::retrieve_slots::kernel::step); `part_sums` `[P, splits, G, 2]`, `bins` `[P, BINS]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn count_kernel(
    lengths: &[i32],
    newest: &[i32],
    table: &[i32],
    logits: &[f32],
    ordered: &mut [u32],
    part_sums: &[f32],
    bins: &[Atomic<u32>],
    pairs: usize,
    kv_heads: usize,
    splits: usize,
    stride: usize,
    block: usize,
    hidden: u32,
    #[comptime] blueprint: Blueprint,
) {
    let (group, units) = comptime!((blueprint.group, blueprint.units));
    let cube = CUBE_POS;
    if cube >= pairs * splits {
        terminate!();
    }
    let (pair, split) = (cube / splits, cube % splits);
    let outset =
        outset_of(table, pair, lengths[pair], newest[pair / kv_heads], block, hidden, blueprint);
    if table[outset.own + DECIDED] == i32::new(RETRIEVES as i64) {
        let highest = highest(part_sums, pair, splits, blueprint);
        let joins = comptime!(!blueprint.direct());
        let logs = logs_of(part_sums, pair, splits, joins, blueprint);
        let histogram = Shared::<[Atomic<u32>]>::new_slice(BINS);
        let mut bin = UNIT_POS as usize;
        while bin < BINS {
            histogram[bin].store(0u32);
            bin += units;
        }
        sync_cube();
        let count = outset.sight.local - outset.sight.start;
        let share = count.div_ceil(splits);
        let end = outset.sight.start + min((split + 1) * share, count);
        let mut i = outset.sight.start + min(split * share, count) + UNIT_POS as usize;
        while i < end {
            // Scores in order, or the bits of logits.
            let mut some = Array::<u32>::new(comptime!(CHUNK * group));
            #[unroll]
            for c in 0..CHUNK {
                let at = min(i + c * units, end - 1);
                #[unroll]
                for g in 0..group {
                    some[c * group + g] = if joins {
                        u32::reinterpret(logits[(pair * group + g) * stride + at])
                    } else {
                        ordered[pair * stride + at]
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
                        key = high_of(score_of(&own, &logs, blueprint));
                        ordered[pair * stride + at] = key;
                    }
                    histogram[bin_of(key, highest)].fetch_add(1u32);
                }
            }
            i += CHUNK * units;
        }
        sync_cube();
        bin = UNIT_POS as usize;
        while bin < BINS {
            let count = histogram[bin].load();
            if count > 0 {
                bins[pair * BINS + bin].fetch_add(count);
            }
            bin += units;
        }
    }
}
