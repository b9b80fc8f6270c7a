//! Prefix sums over a cube's units.

use cubecl::prelude::*;

/// The sum over all units before this one, and the sum over all units. `parts` has room for one
/// number a plane.
#[cube]
pub(crate) fn exclusive(value: u32, parts: &mut Shared<[u32]>) -> (u32, u32) {
    let own = plane_exclusive_sum(value);
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    let all = plane_sum(value);
    // All units have read the previous sums.
    sync_cube();
    if UNIT_POS_PLANE == 0 {
        parts[plane] = all;
    }
    sync_cube();
    let mut before = own;
    let mut total = 0u32;
    for other in 0..(CUBE_DIM / PLANE_DIM) as usize {
        let sum = parts[other];
        before += select(other < plane, sum, 0u32);
        total += sum;
    }
    (before, total)
}
