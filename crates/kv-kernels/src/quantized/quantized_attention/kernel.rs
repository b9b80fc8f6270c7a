//! The kernel of `quantized_attention`, for every CubeCL device. A cube takes a part of a range's
//! blocks, two blocks of 64 slots a round:
//!
//! 1. all units multiply the queries by the blocks' steps and minima, in shared memory;
//! 2. each unit makes the logits of one slot, and planes reduce their maxima;
//! 3. each unit sums some words of the values, over every `teams`-th slot.
//!
//! Each cube leaves the maximum, the sum of weights and the weighted values of its part;
//! `combine.rs` reduces the parts and the attention so far.

use cubecl::prelude::*;

use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::{larger, weight_of};
use crate::quantized::layout::kernel::{minimum_of, step_of};
use crate::quantized::layout::{BLOCK, codes_of_word, words};
use crate::quantized::pool::QuantizedBits;
use crate::quantized::pool::kernel::QuantizedSlots;

/// Units of a cube, and slots of a round.
pub(super) const UNITS: usize = 128;
/// Blocks of a round.
const BLOCKS: usize = UNITS / BLOCK;
/// Units that share the sum of a query times the minima of a block.
const SLICES: usize = 8;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    pub(super) group: usize,
    pub(super) head_dim: usize,
    pub(super) bits: QuantizedBits,
    /// The most planes that a cube may have.
    pub(super) planes: usize,
    /// Numbers that shared memory has room for.
    pub(super) room: usize,
}

impl Blueprint {
    /// Teams of units that share the slots of a round, where each unit sums one word of the values:
    /// as many as there are units for, and as many whose sums find room in shared memory.
    fn teams(&self) -> usize {
        let Self { group, head_dim, bits, planes, room } = *self;
        let beside =
            group * (2 * BLOCKS * head_dim + BLOCKS * SLICES + UNITS + planes) + 2 * planes;
        let most = room.saturating_sub(beside) / head_dim;
        (UNITS / words(head_dim, bits.values)).min(most).max(1)
    }
}

/// Ranges of quantised slots, and how many cubes share each.
#[derive(CubeType, CubeLaunch)]
pub(super) struct QuantizedRanges {
    /// First slots, `[B, Hkv]`.
    offsets: Box<[i32]>,
    /// `[B, Hkv]`
    lengths: Box<[i32]>,
    /// `B * Hkv`
    total_kv_heads: usize,
    splits: usize,
}

/// The parts' sums.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Parts {
    /// Weighted values, `[B * Hkv, splits, G, D]`.
    pub(super) values: Box<[f32]>,
    /// Maxima and sums of weights, `[B * Hkv, splits, G, 2]`.
    pub(super) stats: Box<[f32]>,
}

#[cube(launch_unchecked)]
pub(super) fn quantized_attention_kernel<F: Float>(
    queries: &[F],
    scale: f32,
    ranges: &QuantizedRanges,
    pool: &QuantizedSlots,
    parts: &mut Parts,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let Blueprint { group, head_dim, bits, planes, .. } = blueprint;
    let key_words = comptime!(words(head_dim, bits.keys));
    let key_codes = comptime!(codes_of_word(bits.keys));
    let value_words = comptime!(words(head_dim, bits.values));
    let value_codes = comptime!(codes_of_word(bits.values));
    let teams = comptime!(blueprint.teams());
    let cube = CUBE_POS;
    if cube >= ranges.total_kv_heads * ranges.splits {
        terminate!();
    }
    let kv_head = cube / ranges.splits;
    let split = cube % ranges.splits;
    let offset = max(ranges.offsets[kv_head], 0) as usize;
    let length = max(ranges.lengths[kv_head], 0) as usize;
    let blocks = length.div_ceil(BLOCK.comptime());
    let share = blocks.div_ceil(ranges.splits);
    let first = min(split * share, blocks);
    let end = min(first + share, blocks);
    let unit = UNIT_POS as usize;
    let word_of_unit = unit % value_words;
    let team = unit / value_words;

    // `q_d s_d` and `q_d m_d` of each block and query head.
    let mut stepped = Shared::<[f32]>::new_slice(comptime!(BLOCKS * group * head_dim));
    let mut offsets = Shared::<[f32]>::new_slice(comptime!(BLOCKS * group * head_dim));
    let mut bases = Shared::<[f32]>::new_slice(comptime!(BLOCKS * group * SLICES));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(UNITS * group));
    let mut plane_maxima = Shared::<[f32]>::new_slice(comptime!(planes * group));

    let mut maxima = Array::<f32>::new(group);
    // This unit's share of the sums of weights, and of the weights times the values' minima.
    let mut sums = Array::<f32>::new(group);
    let mut minima = Array::<f32>::new(group);
    let mut values = Array::<f32>::new(comptime!(group * value_codes));
    #[unroll]
    for g in 0..group {
        maxima[g] = f32::new(LOWEST_LOGIT);
        sums[g] = 0.0f32;
        minima[g] = 0.0f32;
        #[unroll]
        for i in 0..value_codes {
            values[g * value_codes + i] = 0.0f32;
        }
    }

    let rounds = (end - first).div_ceil(BLOCKS.comptime());
    for round in 0..rounds {
        let block = first + round * BLOCKS.comptime();
        let mut i = unit;
        while i < comptime!(BLOCKS * head_dim) {
            let which = i / head_dim;
            let channel = i % head_dim;
            // Behind the last block, the last block is read again; its logits are ignored.
            let there = offset / BLOCK.comptime() + min(block + which, end - 1);
            let scales = pool.key_scales[there * head_dim + channel];
            #[unroll]
            for g in 0..group {
                let q = f32::cast_from(queries[(kv_head * group + g) * head_dim + channel]) * scale;
                let to = (which * group + g) * head_dim + channel;
                stepped[to] = q * step_of(scales);
                offsets[to] = q * minimum_of(scales);
            }
            i += UNITS.comptime();
        }
        sync_cube();
        let mut i = unit;
        while i < comptime!(BLOCKS * group * SLICES) {
            let row = i / SLICES.comptime();
            let slice = comptime!(head_dim.div_ceil(SLICES));
            let from = i % SLICES.comptime() * slice;
            let mut base = 0.0f32;
            for channel in from..min(from + slice, head_dim.runtime()) {
                base += offsets[row * head_dim + channel];
            }
            bases[i] = base;
            i += UNITS.comptime();
        }
        sync_cube();

        let slot = block * BLOCK.comptime() + unit;
        let there = slot < min(end * BLOCK.comptime(), length);
        let at = offset + min(slot, length - 1);
        let which = unit / BLOCK.comptime();
        let mut logits = Array::<f32>::new(group);
        #[unroll]
        for g in 0..group {
            let mut base = 0.0f32;
            #[unroll]
            for s in 0..SLICES.comptime() {
                base += bases[(which * group + g) * SLICES.comptime() + s];
            }
            logits[g] = base;
        }
        for w in 0..key_words {
            let word = pool.key_codes[at * key_words + w];
            #[unroll]
            for i in 0..key_codes {
                let channel = w * key_codes + i;
                if comptime!(key_words * key_codes == head_dim) || channel < head_dim {
                    let code = (word >> comptime!((i * bits.keys) as u32))
                        & comptime!((1u32 << bits.keys) - 1);
                    let code = f32::cast_from(code);
                    #[unroll]
                    for g in 0..group {
                        logits[g] += stepped[(which * group + g) * head_dim + channel] * code;
                    }
                }
            }
        }
        let value_scale = pool.value_scales[at];
        #[unroll]
        for g in 0..group {
            logits[g] = select(there, logits[g], f32::new(LOWEST_LOGIT));
            let max = plane_max(logits[g]);
            if UNIT_POS_PLANE == 0 {
                plane_maxima[PLANE_POS as usize * group + g] = max;
            }
        }
        sync_cube();
        let of_cube = (CUBE_DIM / PLANE_DIM) as usize;
        #[unroll]
        for g in 0..group {
            let mut top = maxima[g];
            for p in 0..of_cube {
                top = larger(top, plane_maxima[p * group + g]);
            }
            let factor = weight_of(maxima[g], top);
            maxima[g] = top;
            let mut weight = weight_of(logits[g], top);
            weight = select(there, weight, 0.0f32);
            sums[g] = sums[g] * factor + weight;
            minima[g] = minima[g] * factor + weight * minimum_of(value_scale);
            weights[unit * group + g] = weight * step_of(value_scale);
            #[unroll]
            for i in 0..value_codes {
                values[g * value_codes + i] *= factor;
            }
        }
        sync_cube();
        if team < teams {
            let count = min(
                UNITS.comptime(),
                min(end * BLOCK.comptime(), length) - block * BLOCK.comptime(),
            );
            let mut t = team;
            while t < count {
                let row = offset + block * BLOCK.comptime() + t;
                let word = pool.value_codes[row * value_words + word_of_unit];
                #[unroll]
                for i in 0..value_codes {
                    let code = (word >> comptime!((i * bits.values) as u32))
                        & comptime!((1u32 << bits.values) - 1);
                    let code = f32::cast_from(code);
                    #[unroll]
                    for g in 0..group {
                        values[g * value_codes + i] += weights[t * group + g] * code;
                    }
                }
                t += teams;
            }
        }
        sync_cube();
    }

    // The units' shares are reduced, one query head after another.
    let mut plane_sums = Shared::<[f32]>::new_slice(comptime!(2 * planes));
    let mut rows = Shared::<[f32]>::new_slice(comptime!(teams * head_dim));
    #[unroll]
    for g in 0..group {
        let sum = plane_sum(sums[g]);
        let minimum = plane_sum(minima[g]);
        if UNIT_POS_PLANE == 0 {
            plane_sums[PLANE_POS as usize * 2] = sum;
            plane_sums[PLANE_POS as usize * 2 + 1] = minimum;
        }
        if team < teams {
            #[unroll]
            for i in 0..value_codes {
                let channel = word_of_unit * value_codes + i;
                if channel < head_dim {
                    rows[team * head_dim + channel] = values[g * value_codes + i];
                }
            }
        }
        sync_cube();
        let mut sum = 0.0f32;
        let mut minimum = 0.0f32;
        for p in 0..(CUBE_DIM / PLANE_DIM) as usize {
            sum += plane_sums[p * 2];
            minimum += plane_sums[p * 2 + 1];
        }
        let part = (kv_head * ranges.splits + split) * group + g;
        let mut channel = unit;
        while channel < head_dim {
            let mut total = minimum;
            for t in 0..teams {
                total += rows[t * head_dim + channel];
            }
            parts.values[part * head_dim + channel] = total;
            channel += UNITS.comptime();
        }
        if unit == 0 {
            parts.stats[part * 2] = maxima[g];
            parts.stats[part * 2 + 1] = sum;
        }
        sync_cube();
    }
}
