//! Sums of exponentials of logits: from a unit's logits over a part's to a range's.

use cubecl::prelude::*;

use crate::cis::blueprint::Blueprint;
use crate::cis::log_sums::Sums;

/// Sums the exponentials of a part's logits over a cube's units, and writes the sums.
///
/// # Shapes
/// `part_sums` `[parts, G, 2]`.
#[cube]
pub(super) fn write_sums(
    sums: &Sums,
    part_sums: &mut [f32],
    part: usize,
    #[comptime] blueprint: Blueprint,
) {
    let (group, team) = comptime!((blueprint.group, blueprint.team));
    let member = UNIT_POS as usize % team;
    let mut own = Sums::none(group);
    #[unroll]
    for g in 0..group {
        if member == comptime!(g % team) {
            own.tops[g] = sums.tops[g / team];
            own.totals[g] = sums.totals[g / team];
        }
    }
    let all = over_cube(&own, blueprint);
    if UNIT_POS == 0 {
        #[unroll]
        for g in 0..group {
            part_sums[2 * (part * group + g)] = all.tops[g];
            part_sums[2 * (part * group + g) + 1] = all.totals[g];
        }
    }
}

/// Returns the sums of a whole range from the sums of its parts.
#[cube]
pub(super) fn sums_of(
    part_sums: &[f32],
    kv_head: usize,
    parts: usize,
    #[comptime] blueprint: Blueprint,
) -> Sums {
    let group = blueprint.group.comptime();
    let mut sums = Sums::none(group);
    let mut part = UNIT_POS as usize;
    while part < parts {
        #[unroll]
        for g in 0..group {
            let at = 2 * ((kv_head * parts + part) * group + g);
            sums.add(g, part_sums[at], part_sums[at + 1]);
        }
        part += blueprint.units.comptime();
    }
    over_cube(&sums, blueprint)
}

/// Sums over all units of a cube.
#[cube]
fn over_cube(sums: &Sums, #[comptime] blueprint: Blueprint) -> Sums {
    let (group, most_planes) = comptime!((blueprint.group, blueprint.planes()));
    let mut planes = Shared::<[f32]>::new_slice(comptime!(2 * most_planes * group));
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    // All units have read the previous sums.
    sync_cube();
    #[unroll]
    for g in 0..group {
        let most = plane_max(sums.tops[g]);
        let total = plane_sum(sums.totals[g] * (sums.tops[g] - most).exp());
        if UNIT_POS_PLANE == 0 {
            planes[2 * (g * most_planes + plane)] = most;
            planes[2 * (g * most_planes + plane) + 1] = total;
        }
    }
    sync_cube();
    // Each plane sums over all planes.
    let mut some = Sums::none(group);
    let mut other = UNIT_POS_PLANE;
    while other < CUBE_DIM / PLANE_DIM {
        #[unroll]
        for g in 0..group {
            let at = 2 * (g * most_planes + other as usize);
            some.add(g, planes[at], planes[at + 1]);
        }
        other += PLANE_DIM;
    }
    let mut all = Sums::none(group);
    #[unroll]
    for g in 0..group {
        let most = plane_max(some.tops[g]);
        all.tops[g] = most;
        all.totals[g] = plane_sum(some.totals[g] * (some.tops[g] - most).exp());
    }
    all
}

/// The log-sum-exps of a range's queries, or zeros where they are not wanted.
#[cube]
pub(super) fn logs_of(
    part_sums: &[f32],
    kv_head: usize,
    parts: usize,
    #[comptime] wanted: bool,
    #[comptime] blueprint: Blueprint,
) -> Array<f32> {
    let group = blueprint.group.comptime();
    let mut logs = Array::<f32>::new(group);
    if wanted {
        let sums = sums_of(part_sums, kv_head, parts, blueprint);
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
