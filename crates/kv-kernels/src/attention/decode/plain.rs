//! The portable kernel of decode attention, for f32 and for devices without matrix instructions. A
//! team of units shares a slot's row, and each unit of it holds some columns. Each team keeps an
//! online softmax (`subgroup_softmax.rs`): running maxima, sums of weights, and weighted sums of
//! values. The teams' sums are reduced at the end.

use cubecl::prelude::*;

use super::kernel_args::{AttendedRanges, DecodeOutputs, Queries, WeightedPool};
use super::subgroup_softmax::{TeamSums, ThreadGroup, Turn, Weighing, gather_sums, take_rows};
use super::{Features, ViewKind};
use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::{divisor, larger, presence};

/// Units of a cube.
pub(super) const UNITS: usize = 128;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    pub(super) shape: ThreadGroup,
    /// Whether several cubes share a range, so that partial sums are written.
    pub(super) split: bool,
    pub(super) features: Features,
}

/// Attends by one cube for each part of a range. Rows of `D` elements are read in vectors of `N`.
#[cube(launch_unchecked)]
pub(super) fn plain_kernel<F: Float, N: Size>(
    queries: &Queries<Vector<F, N>>,
    ranges: &AttendedRanges,
    pool: &WeightedPool<Vector<F, N>, Vector<F, N>>,
    outputs: &mut DecodeOutputs<Vector<F, N>, Vector<f32, N>>,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let shape = blueprint.shape.comptime();
    let ThreadGroup { group, columns, team: team_size, ahead } = shape;
    let own = shape.own().comptime();
    let features = blueprint.features.comptime();
    let kind = features.view.comptime();
    let teams = (UNITS / team_size).comptime();
    let unrolled = comptime!(ahead > 1);
    let weighing = comptime!(Weighing {
        weighted: features.weighted,
        numerators: features.numerators,
        logits: features.scores,
    });

    let cube = CUBE_POS;
    let splits = ranges.splits;
    if cube >= ranges.total_kv_heads * splits {
        terminate!();
    }
    let kv_head = cube / splits;
    let split = cube % splits;
    let slots = pool.slots;
    let unit = UNIT_POS as usize;
    let lane = unit % team_size;
    let team = unit / team_size;

    let indexer = ranges.indexer(kv_head, kind);
    let count = indexer.count;
    let share = count.div_ceil(splits);
    let first = min(split * share, count);
    let end = min(first + share, count);

    let mut q = Array::<Vector<f32, N>>::new(comptime!(group * own));
    let mut running = TeamSums::<N>::of_nothing(shape);
    #[unroll]
    for g in 0..group {
        #[unroll]
        for c in 0..own {
            let column = lane + c * team_size;
            q[g * own + c] = Vector::new(0.0f32);
            if column < columns {
                q[g * own + c] =
                    Vector::cast_from(queries.rows[(kv_head * group + g) * columns + column])
                        * Vector::new(queries.scale);
            }
        }
    }

    // All teams run equally many rounds, since a plane's teams exchange numbers in each.
    let rounds = (end - first).div_ceil(comptime!(teams * ahead));
    for round in 0..rounds {
        let mut turn = Turn::<F, N>::new(slots, shape);
        #[unroll]
        for a in 0..ahead {
            let i = first + (round * ahead + a) * teams + team;
            // After the part's end, the last slot is read again; its logit is ignored.
            let slot = indexer.slot(&ranges.view, min(i, end - 1), slots, kind);
            let there = min(slot, slots - 1);
            turn.at[a] = select(i < end, slot, slots);
            if features.weighted {
                turn.log_weights[a] = pool.log_weights[there];
            }
            if features.numerators {
                turn.numerators[a] = pool.numerators[there];
            }
            let row = there * columns;
            #[unroll]
            for c in 0..own {
                let column = min(lane + c * team_size, columns - 1);
                turn.keys[a * own + c] = pool.keys[row + column];
                turn.values[a * own + c] = pool.values[row + column];
                if comptime!(kind == ViewKind::List) {
                    // A slot outside the pool must add nothing. The row read for it may hold NaN,
                    // and `0 * NaN` is NaN.
                    if slot == slots {
                        turn.values[a * own + c] = Vector::new(F::new(0.0));
                    }
                }
            }
        }
        take_rows::<F, N>(&q, &turn, &mut running, &mut outputs.scores, lane, weighing, shape);
    }
    let mut maxima = Array::<f32>::new(group);
    let mut sums = Array::<f32>::new(group);
    gather_sums(&running, &mut maxima, &mut sums, lane, shape);

    // The teams' sums are reduced, one query head after another.
    let mut team_maxima = Shared::<[f32]>::new_slice(teams);
    let mut team_sums = Shared::<[f32]>::new_slice(teams);
    let mut rows = Shared::<[Vector<f32, N>]>::new_slice(teams * columns);
    #[unroll]
    for g in 0..group {
        if lane == 0 {
            team_maxima[team] = maxima[g];
            team_sums[team] = sums[g];
        }
        #[unroll]
        for c in 0..own {
            let column = lane + c * team_size;
            if column < columns {
                rows[team * columns + column] = running.values[g * own + c];
            }
        }
        sync_cube();
        // Where a round reads one row, on software drivers, the loops over teams are not unrolled:
        // they would be most of the code, and those drivers take long to compile it.
        let mut top = f32::new(LOWEST_LOGIT);
        #[unroll(unrolled)]
        for t in 0..teams {
            top = larger(top, team_maxima[t]);
        }
        let mut sum = 0.0f32;
        #[unroll(unrolled)]
        for t in 0..teams {
            sum += team_sums[t] * (team_maxima[t] - top).exp();
        }
        let head = kv_head * group + g;
        let part = (kv_head * splits + split) * group + g;
        if unit < columns {
            let mut total = Vector::<f32, N>::new(0.0f32);
            #[unroll(unrolled)]
            for t in 0..teams {
                total += rows[t * columns + unit] * Vector::new((team_maxima[t] - top).exp());
            }
            if comptime!(blueprint.split) {
                outputs.heads.partial[part * columns + unit] = total;
            } else {
                let mut result = total / Vector::new(divisor(sum));
                if features.numerators {
                    result *= Vector::new(presence(sum));
                }
                outputs.heads.output[head * columns + unit] = Vector::cast_from(result);
            }
        }
        if unit == 0 {
            if comptime!(blueprint.split) {
                outputs.heads.stats[part * 2] = top;
                outputs.heads.stats[part * 2 + 1] = sum;
            } else {
                if features.log_sum_exp {
                    // A head that attends to nothing gets `ln 0 = −∞`.
                    outputs.heads.log_sum_exp[head] = top + sum.ln();
                }
            }
        }
        sync_cube();
    }
}
