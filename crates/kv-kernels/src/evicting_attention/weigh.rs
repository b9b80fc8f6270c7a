//! How kernels weigh slots: what each adds to the output, and which adds least.

use cubecl::prelude::*;

pub(crate) use super::reference::{ABSENT, WEIGHTLESS};
use crate::decode_attention::shared::{LOWEST, larger};

/// No place.
pub(crate) const NOWHERE: i32 = i32::MAX;

/// `ln Σ_g α_g ‖v‖₁` of a slot with these logits.
#[cube]
pub(crate) fn importance_of(
    logits: &Array<f32>,
    normalisers: &Array<f32>,
    log_norm: f32,
    #[comptime] group: usize,
) -> f32 {
    let mut top = f32::new(LOWEST);
    #[unroll]
    for g in 0..group {
        top = larger(top, logits[g] - normalisers[g]);
    }
    let mut value = top + log_norm;
    if comptime!(group > 1) {
        let mut sum = 0.0f32;
        #[unroll]
        for g in 0..group {
            sum += (logits[g] - normalisers[g] - top).exp();
        }
        value += sum.ln();
    }
    select(logits[0] < f32::new(WEIGHTLESS), f32::new(ABSENT), value)
}

/// The least importance among the cube's units and its place, the lowest among equals.
#[cube]
pub(crate) fn weakest_of(best: f32, best_place: i32, #[comptime] planes: usize) -> (f32, i32) {
    let mut values = Shared::<[f32]>::new_slice(planes);
    let mut places = Shared::<[i32]>::new_slice(planes);
    let value = plane_min(best);
    let place = plane_min(select(best == value, best_place, i32::new(NOWHERE as i64)));
    if UNIT_POS_PLANE == 0 {
        values[(UNIT_POS / PLANE_DIM) as usize] = value;
        places[(UNIT_POS / PLANE_DIM) as usize] = place;
    }
    sync_cube();
    // Every plane finds the same.
    let mut least = f32::new(ABSENT);
    let mut least_place = i32::new(NOWHERE as i64);
    let mut plane = UNIT_POS_PLANE;
    while plane < CUBE_DIM / PLANE_DIM {
        let (value, place) = (values[plane as usize], places[plane as usize]);
        if value < least || (value == least && place < least_place) {
            least = value;
            least_place = place;
        }
        plane += PLANE_DIM;
    }
    let value = plane_min(least);
    (value, plane_min(select(least == value, least_place, i32::new(NOWHERE as i64))))
}

/// Where a head's next token goes.
#[cube]
pub(crate) fn next_place(weakest: i32, newest: i32, full: bool, length: i32) -> i32 {
    select(full, select(weakest == NOWHERE, newest, weakest), length)
}
