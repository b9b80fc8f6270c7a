//! The CubeCL kernel: one cube for each (sequence, key-value head), whose units walk the slots in
//! tiles with a running maximum.

use cubecl::prelude::*;

use super::Features;

/// Units of a cube, and slots of a tile.
pub(crate) const UNITS: usize = 128;

/// Below every logit that carries weight; a finite stand-in for −∞, which WGSL cannot write down.
const LOWEST: f32 = -3.0e38;
/// The bits of -1e38: logits from there to −∞ have weight 0.
const WEIGHTLESS: u32 = 0xfe96_7699;
/// The bits of −∞.
const NEVER: u32 = 0xff80_0000;

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    /// Vectors of a row.
    pub(crate) columns: usize,
    pub(crate) features: Features,
}

/// # Shapes
/// In vectors of `N`: `query` `[B, Hkv, G, columns]`, `keys` and `values` `[S, columns]`, `output`
/// as `query`; `log_sum_exp` `[B, Hkv, G]`; `probabilities` `[S, G]`.
#[cube(launch)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn decode_attention_kernel<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    values: &[Vector<F, N>],
    log_weights: &[f32],
    offsets: &[i32],
    lengths: &[i32],
    output: &mut [Vector<F, N>],
    log_sum_exp: &mut [f32],
    probabilities: &mut [f32],
    pairs: usize,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let group = blueprint.group.comptime();
    let columns = blueprint.columns.comptime();
    let features = blueprint.features.comptime();
    // Units form teams for the value pass: a team's unit owns one vector column, teams share the
    // slots of a tile.
    let teams = (UNITS / columns).comptime();

    let pair = CUBE_POS;
    if pair >= pairs {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let start = offsets[pair] as usize;
    let length = lengths[pair] as usize;

    let mut queries = Shared::<[Vector<f32, N>]>::new_slice(group * columns);
    let mut logits = Shared::<[f32]>::new_slice(group * UNITS);
    let mut maxima = Shared::<[f32]>::new_slice(group);
    let mut sums = Shared::<[f32]>::new_slice(group);
    let mut rescales = Shared::<[f32]>::new_slice(group);
    let mut partial = Shared::<[Vector<f32, N>]>::new_slice(UNITS);

    let mut load = unit;
    while load < group * columns {
        queries[load] = Vector::cast_from(query[pair * group * columns + load]);
        load += UNITS;
    }
    if unit < group {
        maxima[unit] = LOWEST;
        sums[unit] = 0.0f32;
    }

    let column = unit % columns;
    let team = unit / columns;
    let mut acc = Array::<Vector<f32, N>>::new(group);
    #[unroll]
    for g in 0..group {
        acc[g] = Vector::new(0.0f32);
    }
    sync_cube();

    let tiles = length.div_ceil(UNITS);
    for tile in 0..tiles {
        let first = tile * UNITS;

        // Logits: a unit takes one slot.
        let live = first + unit < length;
        let slot = start + first + unit;
        #[unroll]
        for g in 0..group {
            logits[g * UNITS + unit] = LOWEST;
        }
        if live {
            let mut dots = Array::<f32>::new(group);
            #[unroll]
            for g in 0..group {
                dots[g] = 0.0f32;
            }
            for c in 0..columns {
                let key = Vector::<f32, N>::cast_from(keys[slot * columns + c]);
                #[unroll]
                for g in 0..group {
                    dots[g] += key.dot(queries[g * columns + c]);
                }
            }
            #[unroll]
            for g in 0..group {
                let mut logit = dots[g] * scale;
                if features.weighted {
                    logit += log_weights[slot];
                }
                logits[g * UNITS + unit] = logit;
                if features.probabilities {
                    probabilities[slot * group + g] = logit;
                }
            }
        }
        sync_cube();

        // Running maximum and sum: a unit takes one query head.
        if unit < group {
            let before = maxima[unit];
            let mut max = before;
            for i in 0..UNITS {
                let logit = logits[unit * UNITS + i];
                // Unlike `max`, keeps a NaN from vanishing: it stays in the sum below.
                if logit > max {
                    max = logit;
                }
            }
            let rescale = (before - max).exp();
            let mut sum = sums[unit] * rescale;
            for i in 0..UNITS {
                let logit = logits[unit * UNITS + i];
                let p = weight_of(logit, max);
                logits[unit * UNITS + i] = p;
                sum += p;
            }
            maxima[unit] = max;
            sums[unit] = sum;
            rescales[unit] = rescale;
        }
        sync_cube();

        // Values: a team takes every `teams`-th slot.
        #[unroll]
        for g in 0..group {
            acc[g] *= Vector::new(rescales[g]);
        }
        if team < teams {
            let tile_length = min(length - first, UNITS);
            let mut i = team;
            while i < tile_length {
                let value =
                    Vector::<f32, N>::cast_from(values[(start + first + i) * columns + column]);
                #[unroll]
                for g in 0..group {
                    acc[g] += value * Vector::new(logits[g * UNITS + i]);
                }
                i += teams;
            }
        }
        sync_cube();
    }

    // Sum the teams and normalise, one query head after another.
    #[unroll]
    for g in 0..group {
        partial[unit] = acc[g];
        sync_cube();
        if team == 0 {
            let mut total = Vector::<f32, N>::new(0.0f32);
            for t in 0..teams {
                total += partial[t * columns + column];
            }
            let result = total / Vector::new(divisor(sums[g]));
            output[(pair * group + g) * columns + column] = Vector::cast_from(result);
        }
        sync_cube();
    }
    // `ln 0` of a head that attended to nothing is −∞.
    #[allow(clippy::collapsible_if, reason = "the outer condition is settled at compile time")]
    if features.log_sum_exp {
        if unit < group {
            log_sum_exp[pair * group + unit] = maxima[unit] + sums[unit].ln();
        }
    }
    if features.probabilities {
        // Each unit normalises the logits that it wrote itself.
        let mut i = unit;
        while i < length {
            let slot = start + i;
            #[unroll]
            for g in 0..group {
                let at = slot * group + g;
                probabilities[at] = weight_of(probabilities[at], maxima[g]) / divisor(sums[g]);
            }
            i += UNITS;
        }
    }
}

/// `exp(logit - max)`, and 0 for a slot without weight.
///
/// Compared as bits, of which NaN is none in between: on floats, compilers that may assume that
/// there is no NaN turn it into a weight of 0.
#[cube]
fn weight_of(logit: f32, max: f32) -> f32 {
    let bits = u32::reinterpret(logit);
    let mut p = (logit - max).exp();
    if bits >= WEIGHTLESS && bits <= NEVER {
        p = 0.0f32;
    }
    p
}

/// A sum of weights to divide by: 1 where nothing was attended to.
#[cube]
fn divisor(sum: f32) -> f32 {
    select(u32::reinterpret(sum) == 0u32, 1.0f32, sum)
}
