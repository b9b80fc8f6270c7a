//! The CubeCL kernel: a unit a range.

use cubecl::prelude::*;

/// # Shapes
/// `positions` `[S]`; `offsets`, `lengths`, `starts` `[pairs]`; `newest` `[pairs / kv_heads]`.
#[cube(launch)]
pub(crate) fn window_starts_kernel(
    positions: &[i32],
    offsets: &[i32],
    lengths: &[i32],
    newest: &[i32],
    starts: &mut [i32],
    pairs: usize,
    kv_heads: usize,
    share: u32,
) {
    let pair = ABSOLUTE_POS;
    if pair >= pairs {
        terminate!();
    }
    let number = u32::cast_from(newest[pair / kv_heads] + 1);
    // Tokens are counted from 1 there, positions from 0.
    let first = i32::cast_from(share.mul_hi(number)) - 1;
    let offset = offsets[pair];
    let mut low = i32::new(0);
    let mut high = lengths[pair];
    while low < high {
        let middle = (low + high) / 2;
        if positions[(offset + middle) as usize] < first {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    starts[pair] = low;
}
