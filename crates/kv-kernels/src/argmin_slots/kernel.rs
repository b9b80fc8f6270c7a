//! The CubeCL kernel: one cube a range, a tree over its units.

use cubecl::prelude::*;

/// Units of a cube, and the depth of the tree over them.
pub(crate) const UNITS: usize = 128;
const LEVELS: u32 = UNITS.ilog2();

#[cube(launch)]
pub(crate) fn argmin_slots_kernel(
    scores: &[f32],
    offsets: &[i32],
    lengths: &[i32],
    output: &mut [i32],
    pairs: usize,
) {
    let pair = CUBE_POS;
    if pair >= pairs {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let start = offsets[pair] as usize;
    let length = lengths[pair] as usize;

    let mut lowest = Shared::<[f32]>::new_slice(UNITS);
    let mut slots = Shared::<[i32]>::new_slice(UNITS);

    // A unit's slots ascend, so `<` keeps the lowest among equals.
    let mut best = 0.0f32;
    let mut best_slot = i32::new(-1);
    let mut i = unit;
    while i < length {
        let score = scores[start + i];
        if best_slot < 0 || score < best {
            best = score;
            best_slot = i32::cast_from(start + i);
        }
        i += UNITS;
    }
    lowest[unit] = best;
    slots[unit] = best_slot;
    sync_cube();

    #[unroll]
    for level in 1..LEVELS + 1 {
        let stride = comptime!(UNITS >> level);
        if unit < stride {
            let other = slots[unit + stride];
            let other_score = lowest[unit + stride];
            let mine = slots[unit];
            let my_score = lowest[unit];
            let better = other_score < my_score || (other_score == my_score && other < mine);
            if other >= 0 && (mine < 0 || better) {
                slots[unit] = other;
                lowest[unit] = other_score;
            }
        }
        sync_cube();
    }
    if unit == 0 {
        output[pair] = slots[0];
    }
}
