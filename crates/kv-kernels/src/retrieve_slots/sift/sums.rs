//! Sums of exponentials, of a unit's logits, a part's and a range's.

use cubecl::prelude::*;

use crate::decode_attention::shared::{LOWEST, larger};
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::radix::PLANES;

/// Online sums of exponentials, each beside the largest exponent.
#[derive(CubeType)]
pub(in crate::retrieve_slots) struct Sums {
    pub(super) tops: Array<f32>,
    totals: Array<f32>,
}

#[cube]
impl Sums {
    /// Of nothing.
    pub(in crate::retrieve_slots) fn none(#[comptime] count: usize) -> Sums {
        let mut sums = Sums { tops: Array::new(count), totals: Array::new(count) };
        #[unroll]
        for i in 0..count {
            sums.tops[i] = f32::new(LOWEST);
            sums.totals[i] = 0.0f32;
        }
        sums
    }

    /// Adds `total` times the exponential of `top`.
    pub(in crate::retrieve_slots) fn add(&mut self, #[comptime] i: usize, top: f32, total: f32) {
        let most = larger(self.tops[i], top);
        self.totals[i] = self.totals[i] * (self.tops[i] - most).exp() + total * (top - most).exp();
        self.tops[i] = most;
    }
}

/// Writes the sums of a part's logits, joined over a cube's teams.
///
/// # Shapes
/// `part_sums` `[parts, G, 2]`.
#[cube]
pub(in crate::retrieve_slots) fn join_teams(
    sums: &Sums,
    part_sums: &mut [f32],
    part: usize,
    #[comptime] blueprint: Blueprint,
) {
    let (group, team, units) = comptime!((blueprint.group, blueprint.team, blueprint.units));
    let held = comptime!(group.div_ceil(team));
    let mut all = Shared::<[f32]>::new_slice(comptime!(2 * units * held));
    let unit = UNIT_POS as usize;
    #[unroll]
    for h in 0..held {
        let at = 2 * (h * units + unit);
        all[at] = sums.tops[h];
        all[at + 1] = sums.totals[h];
    }
    sync_cube();
    let mut g = unit;
    while g < group {
        let mut own = Sums::none(1usize);
        for other in 0..comptime!(units / team) {
            let at = 2 * (g / team * units + other * team + g % team);
            own.add(0usize, all[at], all[at + 1]);
        }
        part_sums[2 * (part * group + g)] = own.tops[0];
        part_sums[2 * (part * group + g) + 1] = own.totals[0];
        g += units;
    }
}

/// Sums of all of a range's logits, from those of its parts.
#[cube]
pub(super) fn sums_of(
    part_sums: &[f32],
    pair: usize,
    splits: usize,
    #[comptime] blueprint: Blueprint,
) -> Sums {
    let group = blueprint.group.comptime();
    let mut planes = Shared::<[f32]>::new_slice(comptime!(2 * PLANES * group));
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    let mut sums = Sums::none(group);
    let mut split = UNIT_POS as usize;
    while split < splits {
        #[unroll]
        for g in 0..group {
            let at = 2 * ((pair * splits + split) * group + g);
            sums.add(g, part_sums[at], part_sums[at + 1]);
        }
        split += blueprint.units.comptime();
    }
    #[unroll]
    for g in 0..group {
        let most = plane_max(sums.tops[g]);
        let total = plane_sum(sums.totals[g] * (sums.tops[g] - most).exp());
        if UNIT_POS_PLANE == 0 {
            planes[2 * (g * PLANES + plane)] = most;
            planes[2 * (g * PLANES + plane) + 1] = total;
        }
    }
    sync_cube();
    let mut all = Sums::none(group);
    #[unroll]
    for g in 0..group {
        for other in 0..(CUBE_DIM / PLANE_DIM) as usize {
            let at = 2 * (g * PLANES + other);
            all.add(g, planes[at], planes[at + 1]);
        }
    }
    all
}

/// The logarithms of the sums of a range's logits; zeros where nobody asks for them.
#[cube]
pub(super) fn logs_of(
    part_sums: &[f32],
    pair: usize,
    splits: usize,
    #[comptime] wanted: bool,
    #[comptime] blueprint: Blueprint,
) -> Array<f32> {
    let group = blueprint.group.comptime();
    let mut logs = Array::<f32>::new(group);
    if wanted {
        let sums = sums_of(part_sums, pair, splits, blueprint);
        #[unroll]
        for g in 0..group {
            logs[g] = sums.tops[g] + sums.totals[g].ln();
        }
    } else {
        #[unroll]
        for g in 0..group {
            logs[g] = 0.0f32;
        }
    }
    logs
}
