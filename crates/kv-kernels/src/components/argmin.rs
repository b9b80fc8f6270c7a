//! The argmin over a cube's units.

use cubecl::prelude::*;

use super::sentinels::{NO_INDEX, NO_MINIMUM};

/// The least of the units' numbers and its index, the lowest index among equal numbers;
/// [`NO_INDEX`] where no unit has a number. All units get both.
#[cube]
pub(crate) fn block_argmin(best: f32, best_index: i32, #[comptime] planes: usize) -> (f32, i32) {
    let mut values = Shared::<[f32]>::new_slice(planes);
    let mut indices = Shared::<[i32]>::new_slice(planes);
    let value = plane_min(best);
    let index = plane_min(select(best == value, best_index, i32::new(NO_INDEX as i64)));
    if UNIT_POS_PLANE == 0 {
        values[(UNIT_POS / PLANE_DIM) as usize] = value;
        indices[(UNIT_POS / PLANE_DIM) as usize] = index;
    }
    sync_cube();
    // Every plane computes the same minimum.
    let mut least = f32::new(NO_MINIMUM);
    let mut least_index = i32::new(NO_INDEX as i64);
    let mut plane = UNIT_POS_PLANE;
    while plane < CUBE_DIM / PLANE_DIM {
        let (value, index) = (values[plane as usize], indices[plane as usize]);
        if value < least || (value == least && index < least_index) {
            least = value;
            least_index = index;
        }
        plane += PLANE_DIM;
    }
    let value = plane_min(least);
    (value, plane_min(select(least == value, least_index, i32::new(NO_INDEX as i64))))
}
