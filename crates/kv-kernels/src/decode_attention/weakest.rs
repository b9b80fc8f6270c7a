//! Which slot of a part adds least to the output, in the kernel for matrix instructions: a cube
//! looks through the logits that it has kept in shared memory, when its planes have met.
//!
//! Nothing is under way in memory then, so that every instruction counts: importances are
//! logarithms to base 2, which the device's own exponentials are of, and are compared as whole
//! numbers.

use cubecl::prelude::*;

use super::meet::{PLANE, Sums};
use super::shared::larger;
use crate::evicting_attention::weigh::{NOWHERE, WEIGHTLESS};
use crate::nvidia::{exp2, least_of_plane, log2};

/// `log2 e`
pub(super) const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// What no importance is: above all of them.
pub(super) const NO_KEY: u32 = u32::MAX;
/// Slots whose norms are read ahead, of a cube with a whole range and of one with a part.
const AHEAD: [usize; 2] = [4096, 2048];
/// Slots that a unit weighs between two looks at whether there are more.
pub(super) const TOGETHER: usize = 4;

/// Slots of a unit whose norms are read ahead.
pub(super) fn ahead(joined: bool, sums: Sums) -> usize {
    AHEAD[joined as usize] / (sums.planes * PLANE)
}

/// Which of a range's slots a cube weighs, and what of them is where.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Weighed {
    /// The range's first slot, and the place of the cube's first one.
    pub(super) start: usize,
    pub(super) first: usize,
    pub(super) count: usize,
    /// Where in shared memory the logits are, and how far apart those of two query heads.
    pub(super) logits_at: usize,
    pub(super) stride: usize,
    /// The newest token's place.
    pub(super) newest: i32,
}

/// Logarithms of the norms of the first values that a unit weighs. They are on their way while
/// planes meet.
#[cube]
pub(super) fn norms_ahead(
    log_norms: &[f32],
    weighed: &Weighed,
    #[comptime] wanted: bool,
    #[comptime] joined: bool,
    #[comptime] sums: Sums,
) -> Array<f32> {
    let ahead = comptime!(if wanted { ahead(joined, sums) } else { 0 });
    let mut norms = Array::<f32>::new(comptime!(ahead.max(1)));
    #[unroll]
    for c in 0..ahead {
        let slot = c * comptime!(sums.planes * PLANE) + UNIT_POS as usize;
        norms[c] = 0.0f32;
        if slot < weighed.count {
            norms[c] = log_norms[weighed.start + weighed.first + slot];
        }
    }
    norms
}

/// The least importance, as a key that orders as importances do, and the lowest place that has it.
/// Only the first plane knows them. `maxima` and `weights` are those of the query heads' logits.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn weakest(
    totals: &Shared<[f32]>,
    maxima: &Shared<[f32]>,
    weights: &Shared<[f32]>,
    norms: &Array<f32>,
    log_norms: &[f32],
    weighed: &Weighed,
    #[comptime] spares_newest: bool,
    #[comptime] joined: bool,
    #[comptime] sums: Sums,
) -> (u32, i32) {
    let group = sums.group.comptime();
    let units = comptime!(sums.planes * PLANE);
    let ahead = comptime!(ahead(joined, sums));
    let mut normalisers = Array::<f32>::new(group);
    #[unroll]
    for g in 0..group {
        normalisers[g] = maxima[g] * LOG2_E + log2(weights[g]);
    }
    let absent = f32::new(f32::MAX);
    let mut best = absent;
    let mut best_slot = usize::new(0);
    #[unroll]
    for round in 0..comptime!(ahead.div_ceil(TOGETHER)) {
        if comptime!(round * TOGETHER * units) < weighed.count {
            // Without branches, so that the slots of a round wait for nothing one after another.
            #[unroll]
            for c in comptime!(round * TOGETHER)..comptime!(((round + 1) * TOGETHER).min(ahead)) {
                let slot = c * units + UNIT_POS as usize;
                let value = importance(
                    totals,
                    &normalisers,
                    norms[c],
                    slot,
                    weighed,
                    absent,
                    spares_newest,
                    group,
                );
                // Slots ascend, so `<` keeps the lowest among equals.
                best_slot = select(value < best, slot, best_slot);
                best = min(best, value);
            }
        }
    }
    let mut slot = comptime!(ahead * units) + UNIT_POS as usize;
    while slot < weighed.count {
        let norm = log_norms[weighed.start + weighed.first + slot];
        let value =
            importance(totals, &normalisers, norm, slot, weighed, absent, spares_newest, group);
        best_slot = select(value < best, slot, best_slot);
        best = min(best, value);
        slot += units;
    }

    least_of_cube(best, weighed.first + best_slot, sums)
}

/// The least of the units' importances, as a key that orders as importances do, and the lowest
/// place that has it. Only the first plane knows them.
#[cube]
pub(super) fn least_of_cube(best: f32, place: usize, #[comptime] sums: Sums) -> (u32, i32) {
    let mut keys = Shared::<[u32]>::new_slice(sums.planes);
    let mut places = Shared::<[u32]>::new_slice(sums.planes);
    let own = select(best < f32::new(f32::MAX), key_of(best), u32::new(NO_KEY as i64));
    let key = least_of_plane(own);
    let nowhere = u32::new(NOWHERE as i64);
    let place = place as u32;
    let place = least_of_plane(select(own == key && key != NO_KEY, place, nowhere));
    let plane = UNIT_POS as usize / PLANE;
    if UNIT_POS as usize == plane * PLANE {
        keys[plane] = key;
        places[plane] = place;
    }
    sync_cube();
    let mut least = u32::new(NO_KEY as i64);
    let mut least_place = nowhere;
    if (UNIT_POS as usize) < PLANE {
        let plane = min(UNIT_POS as usize, comptime!(sums.planes - 1));
        let own = keys[plane];
        least = least_of_plane(own);
        least_place = least_of_plane(select(own == least, places[plane], nowhere));
    }
    (least, least_place as i32)
}

/// `log2 Σ_g α_g ‖v‖₁` of a slot of the cube's; `absent` for what is no candidate.
#[cube]
pub(super) fn importance(
    totals: &Shared<[f32]>,
    normalisers: &Array<f32>,
    log_norm: f32,
    slot: usize,
    weighed: &Weighed,
    absent: f32,
    #[comptime] spares_newest: bool,
    #[comptime] group: usize,
) -> f32 {
    let at = weighed.logits_at + min(slot, weighed.count - 1);
    // What is no number is not without weight; it is below nothing, and never the least.
    let weightless = totals[at] < f32::new(WEIGHTLESS);
    let mut goes = slot < weighed.count && !weightless;
    if spares_newest {
        goes = goes && (weighed.first + slot) as i32 != weighed.newest;
    }
    let mut shares = Array::<f32>::new(group);
    let mut top = totals[at] * LOG2_E - normalisers[0];
    shares[0] = top;
    #[unroll]
    for g in 1..group {
        shares[g] = totals[at + g * weighed.stride] * LOG2_E - normalisers[g];
        top = larger(top, shares[g]);
    }
    let mut value = top + log_norm * LOG2_E;
    if comptime!(group > 1) {
        let mut sum = 0.0f32;
        #[unroll]
        for g in 0..group {
            sum += exp2(shares[g] - top);
        }
        value += log2(sum);
    }
    select(goes, value, absent)
}

/// A whole number that orders as `x` does.
#[cube]
fn key_of(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let sign = bits >> 31;
    // All bits of negative numbers change, the sign of others.
    bits ^ ((0u32 - sign) | 0x8000_0000u32)
}
