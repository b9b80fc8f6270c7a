//! The CubeCL kernel: a unit a range.

use cubecl::prelude::*;

/// # Shapes
/// `positions` `[S]`; `offsets`, `lengths`, `starts` `[total_kv_heads]`; `newest` `[total_kv_heads
/// / kv_heads]`.
#[cube(launch)]
pub(crate) fn window_starts_kernel(
    positions: &[i32],
    offsets: &[i32],
    lengths: &[i32],
    newest: &[i32],
    starts: &mut [i32],
    total_kv_heads: usize,
    kv_heads: usize,
    share: u32,
) {
    let kv_head = ABSOLUTE_POS;
    if kv_head >= total_kv_heads {
        terminate!();
    }
    let number = u32::cast_from(newest[kv_head / kv_heads] + 1);
    // Tokens are counted from 1 there, positions from 0.
    let first = i32::cast_from(share.mul_hi(number)) - 1;
    let offset = offsets[kv_head];
    let mut low = i32::new(0);
    let mut high = lengths[kv_head];
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
