//! The reduction at the end of the kernel for matrix instructions. The partial softmax sums of a
//! cube's planes become one: `m = max_p m_p`, `l = Σ_p exp(m_p − m) l_p`, `o = Σ_p exp(m_p − m)
//! o_p`. The result is divided and written as the output, or left in global memory for `combine.rs`
//! ([`KvSplit::Global`](super::blueprint::KvSplit)), or reduced with the parts of the other cubes
//! of a cluster.
//!
//! The cubes of a cluster write into each other's shared memory, so that one launch produces whole
//! heads and `combine.rs` is not needed.

use cubecl::prelude::*;

use super::kernel_args::HeadOutputs;
use super::mma_fragments::Rows;
use super::products::Running;
use crate::components::cluster::{arrive_at_cluster, send, wait_for_cluster};
use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::{divisor, larger, presence};

/// Units of a plane.
pub(crate) const PLANE: usize = 32;
/// Query heads of a group, padded.
const HEADS: usize = 8;

/// The shape of a cube's partial sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PartialShape {
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    /// `D`
    pub(crate) dim: usize,
    /// Planes of a cube.
    pub(crate) planes: usize,
    /// Whether values have weights of their own, apart from the denominator's.
    pub(crate) numerators: bool,
    /// Whether log-sum-exps are wanted.
    pub(crate) log_sum_exp: bool,
}

impl PartialShape {
    /// Numbers of the group's output that each cube of a cluster reduces. The last cubes may have
    /// fewer.
    fn share(&self, cubes: usize) -> usize {
        (self.group * self.dim).div_ceil(cubes)
    }
}

/// A cube's sums for its query heads after its planes are reduced, in shared memory.
#[derive(CubeType)]
pub(crate) struct CubeSums {
    /// The planes' weighted sums of values, `[planes, group, D]`, scaled to the cube's maximum.
    /// Logits may follow them.
    pub(crate) totals: Shared<[f32]>,
    /// The cube's largest logits, `[group]`; after [`cluster_exchange`] the range's.
    pub(crate) maxima: Shared<[f32]>,
    /// The cube's sums of weights, `[group]`; after [`cluster_exchange`] the range's.
    pub(crate) weights: Shared<[f32]>,
}

/// Reduces the maxima and weights of a cube's planes (warps). Each plane scales its weighted values
/// to the common maximum and leaves them in `totals`.
#[cube]
pub(crate) fn reduce_warps(
    running: &Running,
    mut totals: Shared<[f32]>,
    #[comptime] rows: Rows,
    #[comptime] sums: PartialShape,
) -> CubeSums {
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
            let mut top = f32::new(LOWEST_LOGIT);
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
    // The maximum and the sum of weights of each query head over all planes.
    let mut joint_maxima = Shared::<[f32]>::new_slice(group);
    let mut joint_weights = Shared::<[f32]>::new_slice(group);
    if unit < group {
        let mut top = f32::new(LOWEST_LOGIT);
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
    CubeSums { totals, maxima: joint_maxima, weights: joint_weights }
}

/// The `i`-th number of the group's output, summed over all planes.
#[cube]
fn sum_of(totals: &Shared<[f32]>, i: usize, #[comptime] sums: PartialShape) -> f32 {
    let mut total = 0.0f32;
    #[unroll]
    for other in 0..sums.planes {
        total += totals[other * comptime!(sums.group * sums.dim) + i];
    }
    total
}

/// One number of a head's output before the division.
#[derive(CubeType, Clone, Copy)]
struct HeadSum {
    /// The sum of weights times values.
    total: f32,
    /// The largest logit.
    max: f32,
    /// The sum of weights.
    weight: f32,
}

/// Writes the `i`-th number of the output of a group. With the first number of a query head it
/// writes the head's log-sum-exp.
#[cube]
fn write_output<E: Float>(
    sum: HeadSum,
    outputs: &mut HeadOutputs<E, f32>,
    kv_head: usize,
    i: usize,
    #[comptime] sums: PartialShape,
) {
    let mut result = sum.total / divisor(sum.weight);
    if sums.numerators {
        result *= presence(sum.weight);
    }
    outputs.output[kv_head * comptime!(sums.group * sums.dim) + i] = E::cast_from(result);
    let head = i / sums.dim;
    if sums.log_sum_exp && i == head * sums.dim {
        outputs.log_sum_exp[kv_head * sums.group + head] = sum.max + sum.weight.ln();
    }
}

/// Writes a cube's sums: the output where the cube has the whole range, or a part for `combine.rs`
/// (`is_part`).
#[cube]
pub(crate) fn write_partial<E: Float>(
    cube: &CubeSums,
    outputs: &mut HeadOutputs<E, f32>,
    kv_head: usize,
    part: usize,
    #[comptime] is_part: bool,
    #[comptime] sums: PartialShape,
) {
    let (group, dim) = comptime!((sums.group, sums.dim));
    let mut i = UNIT_POS as usize;
    while i < group * dim {
        let head = i / dim;
        let total = sum_of(&cube.totals, i, sums);
        let (max, weight) = (cube.maxima[head], cube.weights[head]);
        if is_part {
            outputs.partial[part * comptime!(sums.group * sums.dim) + i] = total;
            if i == head * dim {
                let at = (part * group + head) * 2;
                outputs.stats[at] = max;
                outputs.stats[at + 1] = weight;
            }
        } else {
            write_output::<E>(HeadSum { total, max, weight }, outputs, kv_head, i, sums);
        }
        i += comptime!(sums.planes * PLANE);
    }
}

/// The sums that the cubes of a cluster have sent to this cube, `[cubes, ..]`: this cube's share of
/// the weighted values of each part, and the maxima and sums of weights of all query heads.
#[derive(CubeType)]
pub(crate) struct ClusterPartials {
    totals: Shared<[f32]>,
    maxima: Shared<[f32]>,
    weights: Shared<[f32]>,
}

#[cube]
impl ClusterPartials {
    /// Shared memory for the sums of `cubes` cubes; almost none for a cube without a cluster.
    pub(crate) fn room(
        #[comptime] cubes: usize,
        #[comptime] sums: PartialShape,
    ) -> ClusterPartials {
        let (totals, heads) = comptime!(match cubes {
            1 => (1, 1),
            _ => (cubes * sums.share(cubes), cubes * sums.group),
        });
        ClusterPartials {
            totals: Shared::<[f32]>::new_slice(totals),
            maxima: Shared::<[f32]>::new_slice(heads),
            weights: Shared::<[f32]>::new_slice(heads),
        }
    }
}

/// Exchanges partial sums among the cubes of a cluster, each of which has a part of a range. Before
/// the call, `cube.maxima` and `cube.weights` cover this cube's part; after it, they cover the
/// whole range.
#[cube]
pub(crate) fn cluster_exchange(
    received: &ClusterPartials,
    cube: &mut CubeSums,
    rank: usize,
    #[comptime] cubes: usize,
    #[comptime] sums: PartialShape,
) {
    let group = sums.group.comptime();
    let share = comptime!(sums.share(cubes));
    let units = comptime!(sums.planes * PLANE);
    let unit = UNIT_POS as usize;

    // Every cube of the cluster has begun, so its shared memory may be written.
    wait_for_cluster();
    let mut i = unit;
    while i < comptime!(sums.group * sums.dim) {
        let total = sum_of(&cube.totals, i, sums);
        send(total, received.totals.as_ptr(), rank * share + i % share, i / share);
        i += units;
    }
    if unit < comptime!(cubes * sums.group) {
        let (to, head) = (unit / group, unit % group);
        send(cube.maxima[head], received.maxima.as_ptr(), rank * group + head, to);
        send(cube.weights[head], received.weights.as_ptr(), rank * group + head, to);
    }
    arrive_at_cluster();
    wait_for_cluster();
    if unit < group {
        let mut top = f32::new(LOWEST_LOGIT);
        #[unroll]
        for other in 0..cubes {
            top = larger(top, received.maxima[other * group + unit]);
        }
        let mut sum = 0.0f32;
        #[unroll]
        for other in 0..cubes {
            let part = other * group + unit;
            sum += received.weights[part] * (received.maxima[part] - top).exp();
        }
        cube.maxima[unit] = top;
        cube.weights[unit] = sum;
    }
    sync_cube();
}

/// Reduces the received sums, and writes this cube's share of the output. `cube.maxima` and
/// `cube.weights` must cover the whole range already ([`cluster_exchange`]).
#[cube]
pub(crate) fn cluster_reduce<E: Float>(
    received: &ClusterPartials,
    cube: &CubeSums,
    outputs: &mut HeadOutputs<E, f32>,
    kv_head: usize,
    rank: usize,
    #[comptime] cubes: usize,
    #[comptime] sums: PartialShape,
) {
    let share = comptime!(sums.share(cubes));
    let mut own = UNIT_POS as usize;
    while own < share && rank * share + own < comptime!(sums.group * sums.dim) {
        let i = rank * share + own;
        let head = i / sums.dim;
        let top = cube.maxima[head];
        let mut total = 0.0f32;
        #[unroll]
        for other in 0..cubes {
            let factor = (received.maxima[other * sums.group + head] - top).exp();
            total += received.totals[other * share + own] * factor;
        }
        let sum = HeadSum { total, max: top, weight: cube.weights[head] };
        write_output::<E>(sum, outputs, kv_head, i, sums);
        own += comptime!(sums.planes * PLANE);
    }
}
