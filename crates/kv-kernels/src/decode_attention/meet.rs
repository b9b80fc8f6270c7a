//! What follows the last tile of the kernel for matrix instructions: a cube's planes meet, and what
//! they have goes to the output, to a kernel behind, or to the other cubes of a cluster, which have
//! the other parts of the range.
//!
//! Cubes of a cluster write into each other's shared memory, so that whole heads come out of one
//! launch.

use cubecl::prelude::*;

use super::products::{Rows, Running};
use super::shared::{LOWEST, divisor, larger, presence};
use super::weakest::NO_KEY;
use crate::cluster::{arrive_at_cluster, send, wait_for_cluster};
use crate::evicting_attention::weigh::NOWHERE;

/// Units of a plane.
pub(crate) const PLANE: usize = 32;
/// Query heads, padded.
const HEADS: usize = 8;

/// A cube's sums and their shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Sums {
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    /// `D`
    pub(crate) dim: usize,
    /// Planes of a cube.
    pub(crate) planes: usize,
    /// Whether numerators weigh what the denominator does not.
    pub(crate) numerators: bool,
    /// Whether log-sum-exps are wanted.
    pub(crate) log_sum_exp: bool,
}

impl Sums {
    /// Numbers of the output that each of a cluster's cubes joins; the last ones may have fewer.
    fn share(&self, cubes: usize) -> usize {
        (self.group * self.dim).div_ceil(cubes)
    }
}

/// A cube's planes meet: each scales its sums to the common maximum and leaves them in `totals`, as
/// `[planes, group, D]`. Returns the query heads' maxima and sums of weights.
#[cube]
pub(crate) fn meet(
    running: &Running,
    totals: &mut Shared<[f32]>,
    #[comptime] rows: Rows,
    #[comptime] sums: Sums,
) -> (Shared<[f32]>, Shared<[f32]>) {
    let group = sums.group.comptime();
    let planes = sums.planes.comptime();
    let words = rows.words.comptime();
    let unit = UNIT_POS as usize;
    let (plane, lane) = (unit / PLANE, unit % PLANE);
    let (r, j) = (lane / 4, lane % 4);
    let mut weight = running.weight;
    weight += plane_shuffle_xor(weight, 1u32);
    weight += plane_shuffle_xor(weight, 2u32);
    let mut maxima = Shared::<[f32]>::new_slice(comptime!(planes * HEADS));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(planes * HEADS));
    if j == 0 {
        maxima[plane * HEADS + r] = running.max;
        weights[plane * HEADS + r] = weight;
    }
    sync_cube();
    #[unroll]
    for e in 0..2usize {
        let head = 2 * j + e;
        if head < group {
            let mut top = f32::new(LOWEST);
            #[unroll]
            for other in 0..planes {
                top = larger(top, maxima[other * HEADS + head]);
            }
            let factor = (maxima[plane * HEADS + head] - top).exp();
            #[unroll]
            for block in 0..comptime!(rows.blocks()) {
                #[unroll]
                for word in 0..words {
                    let column = comptime!(rows.span()) * block + 2 * words * r + 2 * word;
                    let to = (plane * group + head) * sums.dim + column;
                    let from = comptime!((block * words + word) * 2);
                    totals[to] = running.sums[from].extract(e) * factor;
                    totals[to + 1] = running.sums[from + 1].extract(e) * factor;
                }
            }
        }
    }
    // What all planes have of a query head.
    let mut joint_maxima = Shared::<[f32]>::new_slice(group);
    let mut joint_weights = Shared::<[f32]>::new_slice(group);
    if unit < group {
        let mut top = f32::new(LOWEST);
        #[unroll]
        for other in 0..planes {
            top = larger(top, maxima[other * HEADS + unit]);
        }
        let mut sum = 0.0f32;
        #[unroll]
        for other in 0..planes {
            let row = other * HEADS + unit;
            sum += weights[row] * (maxima[row] - top).exp();
        }
        joint_maxima[unit] = top;
        joint_weights[unit] = sum;
    }
    sync_cube();
    (joint_maxima, joint_weights)
}

/// What all planes have of the group's output, summed: the `i`-th number.
#[cube]
fn sum_of(totals: &Shared<[f32]>, i: usize, #[comptime] sums: Sums) -> f32 {
    let mut total = 0.0f32;
    #[unroll]
    for other in 0..sums.planes {
        total += totals[other * comptime!(sums.group * sums.dim) + i];
    }
    total
}

/// Writes one number of a head's output, and its log-sum-exp with the first.
#[cube]
#[allow(clippy::too_many_arguments)]
fn write_output<E: Float>(
    total: f32,
    max: f32,
    weight: f32,
    output: &mut [E],
    log_sum_exp: &mut [f32],
    pair: usize,
    i: usize,
    #[comptime] sums: Sums,
) {
    let mut result = total / divisor(weight);
    if sums.numerators {
        result *= presence(weight);
    }
    output[pair * comptime!(sums.group * sums.dim) + i] = E::cast_from(result);
    let head = i / sums.dim;
    if sums.log_sum_exp && i == head * sums.dim {
        log_sum_exp[pair * sums.group + head] = max + weight.ln();
    }
}

/// Writes what a cube has of a range, when its planes have met: the output, or one of the parts
/// that a kernel behind joins. `maxima` and `weights` are those of its query heads.
///
/// # Shapes
/// `partial` `[parts, G, D]`, `stats` `[parts, G, 2]` (maximum, sum).
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn write_met<E: Float>(
    totals: &Shared<[f32]>,
    maxima: &Shared<[f32]>,
    weights: &Shared<[f32]>,
    output: &mut [E],
    log_sum_exp: &mut [f32],
    partial: &mut [f32],
    stats: &mut [f32],
    pair: usize,
    part: usize,
    #[comptime] is_part: bool,
    #[comptime] sums: Sums,
) {
    let (group, dim) = comptime!((sums.group, sums.dim));
    let mut i = UNIT_POS as usize;
    while i < group * dim {
        let head = i / dim;
        let total = sum_of(totals, i, sums);
        let (max, weight) = (maxima[head], weights[head]);
        if is_part {
            partial[part * comptime!(sums.group * sums.dim) + i] = total;
            if i == head * dim {
                let at = (part * group + head) * 2;
                stats[at] = max;
                stats[at + 1] = weight;
            }
        } else {
            write_output::<E>(total, max, weight, output, log_sum_exp, pair, i, sums);
        }
        i += comptime!(sums.planes * PLANE);
    }
}

/// What a cluster's cubes have sent to one of them: of every part the numbers of its share of the
/// output, and all query heads' maxima and sums of weights, as `[cubes, ..]`.
#[derive(CubeType)]
pub(crate) struct Received {
    totals: Shared<[f32]>,
    maxima: Shared<[f32]>,
    weights: Shared<[f32]>,
}

#[cube]
impl Received {
    /// Room for what so many cubes send; for hardly anything where a cube is alone.
    pub(crate) fn room(#[comptime] cubes: usize, #[comptime] sums: Sums) -> Received {
        let (totals, heads) = comptime!(match cubes {
            1 => (1, 1),
            _ => (cubes * sums.share(cubes), cubes * sums.group),
        });
        Received {
            totals: Shared::<[f32]>::new_slice(totals),
            maxima: Shared::<[f32]>::new_slice(heads),
            weights: Shared::<[f32]>::new_slice(heads),
        }
    }
}

/// The cubes of a cluster, of which each has a part of a range, exchange their sums. `maxima` and
/// `weights` are those of this cube's part before, and of the whole range after.
#[cube]
pub(crate) fn exchange(
    received: &Received,
    totals: &Shared<[f32]>,
    maxima: &mut Shared<[f32]>,
    weights: &mut Shared<[f32]>,
    rank: usize,
    #[comptime] cubes: usize,
    #[comptime] sums: Sums,
) {
    let group = sums.group.comptime();
    let share = comptime!(sums.share(cubes));
    let units = comptime!(sums.planes * PLANE);
    let unit = UNIT_POS as usize;

    // All of them have begun.
    wait_for_cluster();
    let mut i = unit;
    while i < comptime!(sums.group * sums.dim) {
        let total = sum_of(totals, i, sums);
        send(total, received.totals.as_ptr(), rank * share + i % share, i / share);
        i += units;
    }
    if unit < comptime!(cubes * sums.group) {
        let (to, head) = (unit / group, unit % group);
        send(maxima[head], received.maxima.as_ptr(), rank * group + head, to);
        send(weights[head], received.weights.as_ptr(), rank * group + head, to);
    }
    arrive_at_cluster();
    wait_for_cluster();
    if unit < group {
        let mut top = f32::new(LOWEST);
        #[unroll]
        for cube in 0..cubes {
            top = larger(top, received.maxima[cube * group + unit]);
        }
        let mut sum = 0.0f32;
        #[unroll]
        for cube in 0..cubes {
            let part = cube * group + unit;
            sum += received.weights[part] * (received.maxima[part] - top).exp();
        }
        maxima[unit] = top;
        weights[unit] = sum;
    }
    sync_cube();
}

/// Joins what was received, and writes this cube's share of the output; `maxima` and `weights` are
/// the whole range's.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn write_joined<E: Float>(
    received: &Received,
    maxima: &Shared<[f32]>,
    weights: &Shared<[f32]>,
    output: &mut [E],
    log_sum_exp: &mut [f32],
    pair: usize,
    rank: usize,
    #[comptime] cubes: usize,
    #[comptime] sums: Sums,
) {
    let share = comptime!(sums.share(cubes));
    let mut own = UNIT_POS as usize;
    while own < share && rank * share + own < comptime!(sums.group * sums.dim) {
        let i = rank * share + own;
        let head = i / sums.dim;
        let top = maxima[head];
        let mut total = 0.0f32;
        #[unroll]
        for cube in 0..cubes {
            let factor = (received.maxima[cube * sums.group + head] - top).exp();
            total += received.totals[cube * share + own] * factor;
        }
        write_output::<E>(total, top, weights[head], output, log_sum_exp, pair, i, sums);
        own += comptime!(sums.planes * PLANE);
    }
}

/// The parts' places of least importance, as the first of a cluster's cubes is told of them, and
/// these importances' keys.
#[derive(CubeType)]
pub(super) struct Nominees {
    keys: Shared<[f32]>,
    places: Shared<[f32]>,
}

#[cube]
impl Nominees {
    /// Room for those of so many cubes.
    pub(super) fn room(#[comptime] cubes: usize) -> Nominees {
        Nominees {
            keys: Shared::<[f32]>::new_slice(cubes),
            places: Shared::<[f32]>::new_slice(cubes),
        }
    }
}

/// Tells the first of a cluster's cubes a part's place of least importance, and the key of that
/// importance.
#[cube]
pub(super) fn nominate(nominees: &Nominees, key: u32, place: i32, rank: usize) {
    if UNIT_POS == 0 {
        send(f32::reinterpret(key), nominees.keys.as_ptr(), rank, 0);
        send(f32::reinterpret(place), nominees.places.as_ptr(), rank, 0);
    }
    arrive_at_cluster();
}

/// The place of least importance among the cluster's, which its first cube knows then.
#[cube]
pub(super) fn elect(nominees: &Nominees, rank: usize, #[comptime] cubes: usize) -> i32 {
    wait_for_cluster();
    let mut best = u32::new(NO_KEY as i64);
    let mut best_place = i32::new(NOWHERE as i64);
    // Parts ascend, so `<` keeps the lowest among equals.
    if rank == 0 {
        #[unroll]
        for cube in 0..cubes {
            let (key, place) =
                (u32::reinterpret(nominees.keys[cube]), i32::reinterpret(nominees.places[cube]));
            if key < best {
                best = key;
                best_place = place;
            }
        }
    }
    best_place
}
