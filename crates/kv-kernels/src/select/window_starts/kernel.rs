//! The kernel of `window_starts`, with one unit a range: a binary search, as positions ascend.

use cubecl::prelude::*;

use crate::components::pool::HeadRanges;

/// # Shapes
/// `positions` `[S]`, `newest` `[B]`, `starts` `[B, Hkv]`.
#[cube(launch)]
pub(crate) fn window_starts_kernel(
    positions: &[i32],
    ranges: &HeadRanges,
    newest: &[i32],
    starts: &mut [i32],
    kv_heads: usize,
    share: u32,
) {
    let kv_head = ABSOLUTE_POS;
    if kv_head >= ranges.total_kv_heads {
        terminate!();
    }
    let number = u32::cast_from(newest[kv_head / kv_heads] + 1);
    // The share counts tokens from 1, positions count from 0.
    let first = i32::cast_from(share.mul_hi(number)) - 1;
    let offset = ranges.offsets[kv_head];
    let mut low = i32::new(0);
    let mut high = ranges.lengths[kv_head];
    while low < high {
        let middle = (low + high) / 2;
        if positions[(offset + middle) as usize] < first {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    starts[kv_head] = low;
}
