//! The kernel of `range_slots`, with one unit a listed slot.

use cubecl::prelude::*;

/// # Shapes
/// `offsets` `[B, Hkv]`, `slots` `[B * Hkv, width]`.
#[cube(launch)]
pub(crate) fn range_slots_kernel(offsets: &[i32], slots: &mut [i32], width: usize) {
    let at = ABSOLUTE_POS;
    if at >= slots.len() {
        terminate!();
    }
    slots[at] = offsets[at / width] + i32::cast_from(at % width);
}
