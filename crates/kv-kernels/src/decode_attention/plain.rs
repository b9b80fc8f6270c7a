//! The portable kernel: teams of units share a slot's row, each unit some of its columns.

use cubecl::prelude::*;

use super::Features;
use super::shared::{LOWEST, divisor, larger, presence, seen_of, slot_at, weight_of};

/// Units of a cube.
pub(super) const UNITS: usize = 128;

/// What fixes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    /// Query heads of a key-value head.
    pub(super) group: usize,
    /// Vectors of a row.
    pub(super) columns: usize,
    /// Units that share a row, a power of two within a plane.
    pub(super) team: usize,
    /// Whether other cubes have other parts of the range.
    pub(super) split: bool,
    pub(super) features: Features,
}

/// # Shapes
/// In vectors of `N`: `query` `[B, Hkv, G, columns]`, `keys` and `values` `[S, columns]`, `output`
/// as `query`; `log_sum_exp` `[B, Hkv, G]`; `scores` `[S, G]`. Where the range is split: `partial`
/// `[B, Hkv, splits, G, columns]`, `stats` `[B, Hkv, splits, G, 2]` (maximum, sum).
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn plain_kernel<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    values: &[Vector<F, N>],
    log_weights: &[f32],
    numerators: &[f32],
    offsets: &[i32],
    lengths: &[i32],
    view: &[i32],
    output: &mut [Vector<F, N>],
    log_sum_exp: &mut [f32],
    scores: &mut [f32],
    partial: &mut [Vector<f32, N>],
    stats: &mut [f32],
    pairs: usize,
    splits: usize,
    slots: usize,
    width: usize,
    sinks: usize,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let group = blueprint.group.comptime();
    let columns = blueprint.columns.comptime();
    let team_size = blueprint.team.comptime();
    let features = blueprint.features.comptime();
    let kind = features.view.comptime();
    // Vectors of a unit; the last ones of a row may be short of a full turn.
    let own = columns.div_ceil(team_size).comptime();
    let teams = (UNITS / team_size).comptime();
    // Slots that a team reads before it waits for the first: as many as registers allow.
    let ahead = (if group <= 2 { 4usize } else { 2usize }).comptime();

    let cube = CUBE_POS;
    if cube >= pairs * splits {
        terminate!();
    }
    let pair = cube / splits;
    let split = cube % splits;
    let unit = UNIT_POS as usize;
    let member = unit % team_size;
    let team = unit / team_size;

    let seen = seen_of(view, offsets, lengths, pair, width, sinks, kind);
    let count = seen.count;
    let share = count.div_ceil(splits);
    let first = min(split * share, count);
    let end = min(first + share, count);

    let mut q = Array::<Vector<f32, N>>::new(group * own);
    let mut acc = Array::<Vector<f32, N>>::new(group * own);
    let mut maxima = Array::<f32>::new(group);
    let mut sums = Array::<f32>::new(group);
    #[unroll]
    for g in 0..group {
        maxima[g] = f32::new(LOWEST);
        sums[g] = 0.0f32;
        #[unroll]
        for c in 0..own {
            let column = member + c * team_size;
            q[g * own + c] = Vector::new(0.0f32);
            acc[g * own + c] = Vector::new(0.0f32);
            if column < columns {
                q[g * own + c] = Vector::cast_from(query[(pair * group + g) * columns + column])
                    * Vector::new(scale);
            }
        }
    }

    // Every team goes round as often, so that planes stay together.
    let rounds = (end - first).div_ceil(comptime!(teams * ahead));
    for round in 0..rounds {
        let mut at = Array::<usize>::new(ahead);
        let mut k = Array::<Vector<F, N>>::new(ahead * own);
        let mut v = Array::<Vector<F, N>>::new(ahead * own);
        #[unroll]
        for a in 0..ahead {
            let i = first + (round * ahead + a) * teams + team;
            let mut slot = slots;
            if i < end {
                slot = slot_at(view, &seen, i, slots, kind);
            }
            at[a] = slot;
            let row = min(slot, slots - 1) * columns;
            #[unroll]
            for c in 0..own {
                let column = min(member + c * team_size, columns - 1);
                k[a * own + c] = keys[row + column];
                v[a * own + c] = values[row + column];
            }
        }
        #[unroll]
        for g in 0..group {
            let mut logits = Array::<f32>::new(ahead);
            let mut top = maxima[g];
            #[unroll]
            for a in 0..ahead {
                let mut dot = 0.0f32;
                #[unroll]
                for c in 0..own {
                    // Columns beyond the row meet a query of zeros, but may hold anything.
                    let mut product =
                        Vector::<f32, N>::cast_from(k[a * own + c]).dot(q[g * own + c]);
                    if comptime!(!columns.is_multiple_of(team_size)) {
                        product = select(member + c * team_size < columns, product, 0.0f32);
                    }
                    dot += product;
                }
                let levels = team_size.ilog2().comptime();
                #[unroll]
                for level in 0..levels {
                    dot += plane_shuffle_xor(dot, comptime!(1u32 << level));
                }
                logits[a] = dot;
                if at[a] < slots {
                    let mut logit = dot;
                    if features.weighted {
                        logit += log_weights[at[a]];
                    }
                    if features.scores && member == 0 {
                        scores[at[a] * group + g] = logit;
                    }
                    // Separate numerators may weigh what the denominator does not.
                    top = larger(top, select(features.numerators, dot, logit));
                }
            }
            let rescale = (maxima[g] - top).exp();
            maxima[g] = top;
            sums[g] *= rescale;
            #[unroll]
            for c in 0..own {
                acc[g * own + c] *= Vector::new(rescale);
            }
            #[unroll]
            for a in 0..ahead {
                if at[a] < slots {
                    let mut logit = logits[a];
                    if features.weighted {
                        logit += log_weights[at[a]];
                    }
                    let p = weight_of(logit, top);
                    sums[g] += p;
                    let mut share = p;
                    if features.numerators {
                        share = weight_of(logits[a], top) * numerators[at[a]];
                    }
                    #[unroll]
                    for c in 0..own {
                        acc[g * own + c] +=
                            Vector::<f32, N>::cast_from(v[a * own + c]) * Vector::new(share);
                    }
                }
            }
        }
    }

    // Teams meet, one query head after another.
    let mut team_maxima = Shared::<[f32]>::new_slice(teams);
    let mut team_sums = Shared::<[f32]>::new_slice(teams);
    let mut rows = Shared::<[Vector<f32, N>]>::new_slice(teams * columns);
    #[unroll]
    for g in 0..group {
        if member == 0 {
            team_maxima[team] = maxima[g];
            team_sums[team] = sums[g];
        }
        #[unroll]
        for c in 0..own {
            let column = member + c * team_size;
            if column < columns {
                rows[team * columns + column] = acc[g * own + c];
            }
        }
        sync_cube();
        let mut top = f32::new(LOWEST);
        #[unroll]
        for t in 0..teams {
            top = larger(top, team_maxima[t]);
        }
        let mut sum = 0.0f32;
        #[unroll]
        for t in 0..teams {
            sum += team_sums[t] * (team_maxima[t] - top).exp();
        }
        let head = pair * group + g;
        let part = (pair * splits + split) * group + g;
        if unit < columns {
            let mut total = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for t in 0..teams {
                total += rows[t * columns + unit] * Vector::new((team_maxima[t] - top).exp());
            }
            if comptime!(blueprint.split) {
                partial[part * columns + unit] = total;
            } else {
                let mut result = total / Vector::new(divisor(sum));
                if features.numerators {
                    result *= Vector::new(presence(sum));
                }
                output[head * columns + unit] = Vector::cast_from(result);
            }
        }
        if unit == 0 {
            if comptime!(blueprint.split) {
                stats[part * 2] = top;
                stats[part * 2 + 1] = sum;
            } else {
                if features.log_sum_exp {
                    // `ln 0` of a head that attended to nothing is −∞.
                    log_sum_exp[head] = top + sum.ln();
                }
            }
        }
        sync_cube();
    }
}
