//! The kernel of `quantized_attention` for every CubeCL device. A cube takes a part of a range's
//! blocks, two blocks of 64 slots a round:
//!
//! 1. all units multiply the queries by the blocks' steps and minima, in shared memory;
//! 2. each unit makes the logits of one slot, and planes reduce their maxima;
//! 3. each unit sums four channels of the values, over some words of the round.
//!
//! Each cube leaves the maximum, the sum of weights and the weighted values of its part;
//! [`crate::attention::continued`] reduces the parts and the attention so far.
//!
//! A code `c` is read as the number `1 + c / 2^bits`, and its factor is `2^bits` times as large.
//! The product is then too large by the factor: the sum of all factors of a row is subtracted once.

use cubecl::prelude::*;

use super::kernel_args::{Blueprint, QuantizedRanges};
use crate::attention::continued::combine::Parts;
use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::{larger, weight_of};
use crate::quantized::layout::kernel::{fraction_of, minimum_of, step_of};
use crate::quantized::layout::{BLOCK, codes_of_word, words};
use crate::quantized::pool::kernel::QuantizedSlots;

/// Units of a cube, and slots of a round.
pub(super) const UNITS: usize = 128;
/// Blocks of a round.
const BLOCKS: usize = UNITS / BLOCK;
/// Units that share the sum of a query times the minima of a block.
const SLICES: usize = 8;
/// Channels of the values that a unit sums.
pub(super) const CHANNELS: usize = 4;

impl Blueprint {
    /// Units that sum all channels of the values, [`CHANNELS`] each.
    fn team(&self) -> usize {
        self.head_dim.div_ceil(CHANNELS)
    }

    /// Teams of units that share the values of a round: as many as there are units for, and as many
    /// whose sums find room in shared memory.
    fn teams(&self) -> usize {
        let Self { group, head_dim, planes, room, .. } = *self;
        let beside =
            group * (2 * BLOCKS * head_dim + BLOCKS * SLICES + UNITS + planes) + 2 * planes;
        let most = room.saturating_sub(beside) / head_dim;
        (UNITS / self.team()).min(most).max(1)
    }
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
    let (key_bits, value_bits) = comptime!((bits.keys, bits.values));
    let key_words = comptime!(words(head_dim, key_bits));
    let key_codes = comptime!(codes_of_word(key_bits));
    let value_words = comptime!(words(BLOCK, value_bits));
    let value_codes = comptime!(codes_of_word(value_bits));
    // A code counts as a fraction.
    let key_unit = comptime!((1u32 << key_bits) as f32);
    let value_unit = comptime!((1u32 << value_bits) as f32);
    let (columns, teams) = comptime!((blueprint.team(), blueprint.teams()));
    let cube = CUBE_POS;
    if cube >= ranges.total_kv_heads * ranges.splits {
        terminate!();
    }
    let part = ranges.part(cube);
    let (kv_head, split, offset, length, first, end) =
        (part.kv_head, part.split, part.offset, part.length, part.first, part.end);
    let unit = UNIT_POS as usize;
    let (column, team) = (unit % columns, unit / columns);

    // `2^bits q_d s_d`, and what its product with a code's 1 has too much, of each block and head.
    let mut stepped = Shared::<[f32]>::new_slice(comptime!(BLOCKS * group * head_dim));
    let mut offsets = Shared::<[f32]>::new_slice(comptime!(BLOCKS * group * head_dim));
    let mut bases = Shared::<[f32]>::new_slice(comptime!(BLOCKS * group * SLICES));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(UNITS * group));
    let mut plane_maxima = Shared::<[f32]>::new_slice(comptime!(planes * group));

    let mut maxima = Array::<f32>::new(group);
    // This unit's share of two sums of each head: of softmax weights, and of weights times the
    // values' minima, less the weights times steps that a code's 1 adds. All channels have the
    // second sum in common.
    let mut sums = Array::<f32>::new(group);
    let mut minima = Array::<f32>::new(group);
    let mut values = Array::<f32>::new(comptime!(group * CHANNELS));
    #[unroll]
    for g in 0..group {
        maxima[g] = f32::new(LOWEST_LOGIT);
        sums[g] = 0.0f32;
        minima[g] = 0.0f32;
        #[unroll]
        for k in 0..CHANNELS.comptime() {
            values[g * CHANNELS.comptime() + k] = 0.0f32;
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
            let there = offset + min(block + which, end - 1);
            let scales = pool.key_scales[there * head_dim + channel];
            #[unroll]
            for g in 0..group {
                let q = f32::cast_from(queries[(kv_head * group + g) * head_dim + channel]) * scale;
                let to = (which * group + g) * head_dim + channel;
                let factor = q * step_of(scales) * f32::new(key_unit);
                stepped[to] = factor;
                offsets[to] = q * minimum_of(scales) - factor;
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
        let which = unit / BLOCK.comptime();
        let at = offset + min(block + which, end - 1);
        let within = unit % BLOCK.comptime();
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
            let word = pool.key_codes[(at * key_words + w) * BLOCK.comptime() + within];
            #[unroll]
            for i in 0..key_codes {
                let channel = w * key_codes + i;
                if comptime!(key_words * key_codes == head_dim) || channel < head_dim {
                    let code = fraction_of(word, i, key_bits);
                    #[unroll]
                    for g in 0..group {
                        logits[g] += stepped[(which * group + g) * head_dim + channel] * code;
                    }
                }
            }
        }
        let value_scale = pool.value_scales[at * BLOCK.comptime() + within];
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
            let stepped = weight * step_of(value_scale) * f32::new(value_unit);
            // A block's step may be NaN where the slot is behind the end.
            let own = select(there, weight * minimum_of(value_scale) - stepped, 0.0f32);
            minima[g] = minima[g] * factor + own;
            weights[unit * group + g] = select(there, stepped, 0.0f32);
            #[unroll]
            for k in 0..CHANNELS.comptime() {
                values[g * CHANNELS.comptime() + k] *= factor;
            }
        }
        sync_cube();
        if team < teams {
            let mut task = team;
            while task < comptime!(BLOCKS * value_words) {
                let (which, word) = (task / value_words, task % value_words);
                let at = offset + min(block + which, end - 1);
                let row = (at * value_words + word) * head_dim;
                let mut codes = Array::<u32>::new(CHANNELS);
                #[unroll]
                for k in 0..CHANNELS.comptime() {
                    let channel = column + k * columns;
                    codes[k] = pool.value_codes[row + min(channel, comptime!(head_dim - 1))];
                }
                #[unroll]
                for i in 0..value_codes {
                    let within = word * value_codes + i;
                    if comptime!(value_words * value_codes == BLOCK) || within < BLOCK.comptime() {
                        let slot = which * BLOCK.comptime() + within;
                        #[unroll]
                        for k in 0..CHANNELS.comptime() {
                            let code = fraction_of(codes[k], i, value_bits);
                            #[unroll]
                            for g in 0..group {
                                values[g * CHANNELS.comptime() + k] +=
                                    weights[slot * group + g] * code;
                            }
                        }
                    }
                }
                task += teams;
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
            for k in 0..CHANNELS.comptime() {
                let channel = column + k * columns;
                if channel < head_dim {
                    rows[team * head_dim + channel] = values[g * CHANNELS.comptime() + k];
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
