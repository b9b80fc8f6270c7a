//! The kernel of `quantized_attention` for matrix instructions. The four planes of a cube take one
//! block of 64 slots after another together:
//!
//! 1. All units multiply the queries by the steps and minima of the keys' channels.
//! 2. Keys: each plane multiplies 16 slots. Rows are slots, the summed dimension is channels, and
//!    columns are query heads. A softmax over the logits follows.
//! 3. Values: each plane multiplies a quarter of the channels. Rows are channels, and the summed
//!    dimension is slots.
//!
//! Codes go from words to matrix instructions by a shift and a mask: a code `c` becomes the bf16
//! number `1 + c / 2^bits`, a pair of which is in the two halves of a word. The factors, which are
//! queries times steps, and softmax weights times steps, would lose too much in one bf16 number: a
//! factor is the sum of two of them. A product has 8 columns, for the two numbers of 4 query heads.
//!
//! The order of rows and of the summed dimension is free. Lane `4 r + j` has the slots `2 r` and `2
//! r + 1` of its plane's 16, the same two of each 16 channels, and every fourth word of codes from
//! word `j` on. In products it has columns `2 j` and `2 j + 1`.
//!
//! A plane that took whole blocks by itself would have the sums of all channels in its registers.
//! Two cubes would then fit on a processor, too few to hide the latency of their reads. At batch 8
//! and 3,712 slots on an H200 such a kernel took 39 µs, and this one takes 32.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;
use half::bf16;

use super::kernel_args::{Blueprint, QuantizedRanges};
use crate::attention::continued::combine::Parts;
use crate::components::bf16_pairs::{lead, packed, rounded};
use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::{larger, weight_of};
use crate::quantized::layout::kernel::{fractions_of, minimum_of, step_of};
use crate::quantized::layout::{BLOCK, codes_of_half, codes_of_word, words};
use crate::quantized::pool::kernel::QuantizedPairs;

const PLANE: usize = 32;
const PLANES: usize = 4;
/// Units of a cube.
pub(super) const UNITS: usize = PLANES * PLANE;
/// Lanes that share a row, and rows of a product that have lanes of their own.
const TEAM: usize = 4;
const ROWS: usize = PLANE / TEAM;
/// Query heads and columns of a product.
const HEADS: usize = 4;
const COLUMNS: usize = 2 * HEADS;
/// Rows of a product: slots of a block that a plane has, and channels of the values.
const TILE: usize = BLOCK / PLANES;
/// The most bits of a code that fit into the fraction of a bf16 number.
pub(super) const MOST_BITS: usize = 7;
/// The largest head dim and group for which registers hold the sums.
pub(super) const LARGEST: usize = 256;
pub(super) const LARGEST_GROUP: usize = 2 * HEADS;

impl Blueprint {
    /// Products that the group's query heads need.
    fn head_tiles(self) -> usize {
        self.group.div_ceil(HEADS)
    }

    /// Words of a key's codes that a lane has.
    fn key_words(self) -> usize {
        words(self.head_dim, self.bits.keys).div_ceil(TEAM)
    }

    /// Words of codes that a lane has of each channel of the values.
    fn value_words(self) -> usize {
        words(BLOCK, self.bits.values).div_ceil(TEAM)
    }

    /// Tiles of channels that a plane has.
    fn channel_tiles(self) -> usize {
        (self.head_dim / TILE).div_ceil(PLANES)
    }

    /// Pairs of codes in a lane's words of a key, and of a channel of the values.
    fn pairs(self) -> (usize, usize) {
        (
            self.key_words() * codes_of_half(self.bits.keys),
            self.value_words() * codes_of_half(self.bits.values),
        )
    }

    /// Slots whose weights lie in shared memory: as many as a block's words have codes for.
    fn weight_rows(self) -> usize {
        words(BLOCK, self.bits.values) * codes_of_word(self.bits.values)
    }

    /// Bytes of shared memory.
    pub(super) fn shared_bytes(self) -> usize {
        let heads = self.head_tiles() * HEADS;
        let (key_pairs, _) = self.pairs();
        let numbers = key_pairs * TEAM * self.head_tiles() * COLUMNS
            + self.weight_rows() * heads
            + heads * self.head_dim
            + 4 * PLANES * heads;
        size_of::<f32>() * numbers
    }
}

#[cube(launch_unchecked)]
pub(super) fn quantized_tiles_kernel<F: Float>(
    queries: &[F],
    scale: f32,
    ranges: &QuantizedRanges,
    pool: &QuantizedPairs,
    parts: &mut Parts,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let Blueprint { group, head_dim, bits, .. } = blueprint;
    let (key_bits, value_bits) = comptime!((bits.keys, bits.values));
    let (key_half, value_half) = comptime!((codes_of_half(key_bits), codes_of_half(value_bits)));
    // A code counts as a fraction.
    let key_unit = comptime!((1u32 << key_bits) as f32);
    let value_unit = comptime!((1u32 << value_bits) as f32);
    let key_words = comptime!(words(head_dim, key_bits));
    let value_words = comptime!(words(BLOCK, value_bits));
    let (own_key_words, own_value_words) =
        comptime!((blueprint.key_words(), blueprint.value_words()));
    let (key_pairs, value_pairs) = comptime!(blueprint.pairs());
    let head_tiles = comptime!(blueprint.head_tiles());
    let heads = comptime!(head_tiles * HEADS);
    let channel_tiles = comptime!(blueprint.channel_tiles());
    let cube = CUBE_POS;
    if cube >= ranges.total_kv_heads * ranges.splits {
        terminate!();
    }
    let part = ranges.part(cube);
    let (kv_head, split, offset, length, first, end) =
        (part.kv_head, part.split, part.offset, part.length, part.first, part.end);
    let unit = UNIT_POS as usize;
    let (plane, lane) = (unit / PLANE.comptime(), unit % PLANE.comptime());
    let (r, j) = (lane / TEAM.comptime(), lane % TEAM.comptime());

    let mut query = Shared::<[f32]>::new_slice(comptime!(heads * head_dim));
    let mut factors =
        Shared::<[u32]>::new_slice(comptime!(key_pairs * TEAM * head_tiles * COLUMNS));
    let weight_rows = comptime!(blueprint.weight_rows());
    let mut weights = Shared::<[f32]>::new_slice(comptime!(weight_rows * heads));
    // Of each plane: its part of the bases, its maxima, and its sums.
    let mut plane_bases = Shared::<[f32]>::new_slice(comptime!(PLANES * heads));
    let mut plane_maxima = Shared::<[f32]>::new_slice(comptime!(PLANES * heads));
    let mut plane_sums = Shared::<[f32]>::new_slice(comptime!(2 * PLANES * heads));
    let mut i = unit;
    while i < comptime!(heads * head_dim) {
        let mut q = 0.0f32;
        if i < comptime!(group * head_dim) {
            q = f32::cast_from(queries[kv_head * comptime!(group * head_dim) + i]) * scale;
        }
        query[i] = q;
        i += UNITS.comptime();
    }
    // Words of codes may have more codes than a block has slots: these have no weight.
    let mut i = unit + comptime!(BLOCK * heads);
    while i < comptime!(weight_rows * heads) {
        weights[i] = 0.0f32;
        i += UNITS.comptime();
    }
    sync_cube();

    // Of the heads of columns `2 j` and `2 j + 1`: the maximum so far, and this lane's share of two
    // sums: of softmax weights, and of weights times the values' minima, less the weights times
    // steps that a code's 1 adds. All channels have the second sum in common.
    let mut maxima = Array::<f32>::new(comptime!(2 * head_tiles));
    let mut sums = Array::<f32>::new(comptime!(2 * head_tiles));
    let mut minima = Array::<f32>::new(comptime!(2 * head_tiles));
    let mut values = Array::<Vector<f32, Const<2>>>::new(comptime!(2 * head_tiles * channel_tiles));
    #[unroll]
    for h in 0..comptime!(2 * head_tiles) {
        maxima[h] = f32::new(LOWEST_LOGIT);
        sums[h] = 0.0f32;
        minima[h] = 0.0f32;
    }
    #[unroll]
    for i in 0..comptime!(2 * head_tiles * channel_tiles) {
        values[i] = Vector::new(0.0f32);
    }
    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);

    let mut block = first;
    while block < end {
        let at = offset + block;
        // All codes are on their way before the first of them is needed.
        let mut keys = Array::<Vector<u32, Const<2>>>::new(own_key_words);
        #[unroll]
        for i in 0..own_key_words {
            let word = min(j + comptime!(TEAM * i), comptime!(key_words - 1));
            keys[i] = pool.key_codes
                [(at * key_words + word) * comptime!(BLOCK / 2) + plane * ROWS.comptime() + r];
        }
        let mut codes =
            Array::<Vector<u32, Const<2>>>::new(comptime!(own_value_words * channel_tiles));
        #[unroll]
        for i in 0..own_value_words {
            let word = min(j + comptime!(TEAM * i), comptime!(value_words - 1));
            #[unroll]
            for n in 0..channel_tiles {
                let tile = comptime!(n * PLANES) + plane;
                let tile = min(tile, comptime!(head_dim / TILE - 1));
                codes[i * channel_tiles + n] = pool.value_codes[(at * value_words + word)
                    * comptime!(head_dim / 2)
                    + tile * ROWS.comptime()
                    + r];
            }
        }
        let scales = pool.value_scales[at * comptime!(BLOCK / 2) + plane * ROWS.comptime() + r];

        // `2^bits q_d s_d`, and the sums over channels of `q_d m_d` less these factors.
        let mut bases = Array::<f32>::new(head_tiles);
        #[unroll]
        for n in 0..head_tiles {
            bases[n] = 0.0f32;
        }
        let mut pair = plane * ROWS.comptime() + r;
        while pair < comptime!(key_pairs * TEAM) {
            let (of_lane, team) = (pair / TEAM.comptime(), pair % TEAM.comptime());
            let word = team + TEAM.comptime() * (of_lane / key_half);
            let low = word * comptime!(2 * key_half) + of_lane % key_half;
            let high = low + key_half;
            let low_scale = pool.key_scales[at * head_dim + min(low, comptime!(head_dim - 1))];
            let high_scale = pool.key_scales[at * head_dim + min(high, comptime!(head_dim - 1))];
            #[unroll]
            for n in 0..head_tiles {
                let row = (comptime!(n * HEADS) + j) * head_dim;
                let to = (pair * head_tiles + n) * COLUMNS.comptime() + j;
                let mut q_low = 0.0f32;
                let mut q_high = 0.0f32;
                if low < head_dim {
                    q_low = query[row + low];
                }
                if high < head_dim {
                    q_high = query[row + high];
                }
                let a = q_low * step_of(low_scale) * f32::new(key_unit);
                let b = q_high * step_of(high_scale) * f32::new(key_unit);
                let (a, b) = (rounded(a), rounded(b));
                let (a_lead, b_lead) = (lead(a), lead(b));
                factors[to] = packed(a_lead, b_lead);
                factors[to + HEADS.comptime()] = packed(a - a_lead, b - b_lead);
                bases[n] += q_low * minimum_of(low_scale) + q_high * minimum_of(high_scale) - a - b;
            }
            pair += comptime!(PLANES * ROWS);
        }
        #[unroll]
        for n in 0..head_tiles {
            let mut base = bases[n];
            #[unroll]
            for step in 2..5u32 {
                base += plane_shuffle_xor(base, comptime!(1 << step));
            }
            if r == 0 {
                plane_bases[plane * heads + comptime!(n * HEADS) + j] = base;
            }
        }
        sync_cube();

        // Keys. `logits[2 h + side]` is of slot `2 r + side` of the plane's 16, and of head `h`.
        let mut logits = Array::<f32>::new(comptime!(4 * head_tiles));
        #[unroll]
        for n in 0..head_tiles {
            let mut products = Array::<Vector<f32, Const<2>>>::new(2usize);
            products[0] = Vector::new(0.0f32);
            products[1] = Vector::new(0.0f32);
            #[unroll]
            for m in 0..comptime!(key_pairs.div_ceil(2)) {
                let mut column = Array::<Vector<bf16, Const<2>>>::new(2usize);
                let mut rows = Array::<Vector<bf16, Const<2>>>::new(4usize);
                #[unroll]
                for side in 0..2usize {
                    let pair = comptime!(2 * m + side);
                    let mut factor = 0u32;
                    if comptime!(pair < key_pairs) {
                        let row = comptime!(pair * TEAM) + j;
                        factor = factors[(row * head_tiles + n) * COLUMNS.comptime() + r];
                    }
                    column[side] = Vector::reinterpret(factor);
                    let pair = comptime!(pair.min(key_pairs - 1));
                    #[unroll]
                    for slot in 0..2usize {
                        let word = keys[comptime!(pair / key_half)].extract(slot);
                        let code = fractions_of(word, comptime!(pair % key_half), key_bits);
                        rows[comptime!(2 * side + slot)] = Vector::reinterpret(code);
                    }
                }
                products = def.execute(&rows, &column, &products);
            }
            #[unroll]
            for e in 0..2usize {
                let head = comptime!(n * HEADS + e) + 2 * (j % 2);
                let mut base = 0.0f32;
                #[unroll]
                for p in 0..PLANES.comptime() {
                    base += plane_bases[comptime!(p * heads) + head];
                }
                let mut top = f32::new(LOWEST_LOGIT);
                #[unroll]
                for slot in 0..2usize {
                    // The two numbers of a factor are in columns of lanes `j` and `j + 2`.
                    let own = products[slot].extract(e);
                    let logit = own + plane_shuffle_xor(own, 2u32) + base;
                    let within = plane * TILE.comptime() + 2 * r + slot;
                    let there = block * BLOCK.comptime() + within < length;
                    let logit = select(there, logit, f32::new(LOWEST_LOGIT));
                    logits[comptime!((2 * n + e) * 2 + slot)] = logit;
                    top = larger(top, logit);
                }
                #[unroll]
                for step in 2..5u32 {
                    top = larger(top, plane_shuffle_xor(top, comptime!(1 << step)));
                }
                if r == 0 && j < 2 {
                    plane_maxima[plane * heads + head] = top;
                }
            }
        }
        sync_cube();

        // Softmax.
        #[unroll]
        for h in 0..comptime!(2 * head_tiles) {
            let head = comptime!(h / 2 * HEADS + h % 2) + 2 * (j % 2);
            let mut top = maxima[h];
            #[unroll]
            for p in 0..PLANES.comptime() {
                top = larger(top, plane_maxima[comptime!(p * heads) + head]);
            }
            let factor = weight_of(maxima[h], top);
            maxima[h] = top;
            let mut sum = sums[h] * factor;
            let mut added = minima[h] * factor;
            #[unroll]
            for slot in 0..2usize {
                let within = plane * TILE.comptime() + 2 * r + slot;
                let there = block * BLOCK.comptime() + within < length;
                let weight = weight_of(logits[comptime!(2 * h + slot)], top);
                let weight = select(there, weight, 0.0f32);
                let scale = scales.extract(slot);
                // A step may be NaN where the slot is behind the end.
                let stepped = weight * step_of(scale) * f32::new(value_unit);
                let stepped = select(there, rounded(stepped), 0.0f32);
                sum += weight;
                added += select(there, weight * minimum_of(scale), 0.0f32) - stepped;
                if j < 2 {
                    weights[within * heads + head] = stepped;
                }
            }
            sums[h] = sum;
            minima[h] = added;
            #[unroll]
            for i in 0..comptime!(2 * channel_tiles) {
                let of = comptime!((h / 2) * 2 * channel_tiles + i);
                let mut both = values[of];
                both.insert(comptime!(h % 2), both.extract(comptime!(h % 2)) * factor);
                values[of] = both;
            }
        }
        sync_cube();

        // Values.
        #[unroll]
        for n in 0..head_tiles {
            #[unroll]
            for m in 0..comptime!(value_pairs.div_ceil(2)) {
                let mut column = Array::<Vector<bf16, Const<2>>>::new(2usize);
                #[unroll]
                for side in 0..2usize {
                    let pair = comptime!(2 * m + side);
                    let mut factor = 0u32;
                    if comptime!(pair < value_pairs) {
                        let word = j + comptime!(TEAM * (pair / value_half));
                        let low = word * comptime!(2 * value_half) + comptime!(pair % value_half);
                        if comptime!(value_words.is_multiple_of(TEAM)) || word < value_words {
                            let of = low * heads + comptime!(n * HEADS) + r % 4;
                            let (a, b) = (weights[of], weights[of + comptime!(value_half * heads)]);
                            let (a_lead, b_lead) = (lead(a), lead(b));
                            let rest = packed(a - a_lead, b - b_lead);
                            factor = select(r < 4, packed(a_lead, b_lead), rest);
                        }
                    }
                    column[side] = Vector::reinterpret(factor);
                }
                #[unroll]
                for tile in 0..channel_tiles {
                    let mut rows = Array::<Vector<bf16, Const<2>>>::new(4usize);
                    #[unroll]
                    for side in 0..2usize {
                        let pair = comptime!((2 * m + side).min(value_pairs - 1));
                        let of_word = comptime!(pair / value_half * channel_tiles + tile);
                        #[unroll]
                        for channel in 0..2usize {
                            let word = codes[of_word].extract(channel);
                            let code = fractions_of(word, comptime!(pair % value_half), value_bits);
                            rows[comptime!(2 * side + channel)] = Vector::reinterpret(code);
                        }
                    }
                    let of = comptime!(2 * (n * channel_tiles + tile));
                    let mut sums = Array::<Vector<f32, Const<2>>>::new(2usize);
                    sums[0] = values[of];
                    sums[1] = values[comptime!(of + 1)];
                    sums = def.execute(&rows, &column, &sums);
                    values[of] = sums[0];
                    values[comptime!(of + 1)] = sums[1];
                }
            }
        }
        block += 1;
    }

    // The sums of the planes' slots; the maxima are the same in all planes.
    #[unroll]
    for h in 0..comptime!(2 * head_tiles) {
        let head = comptime!(h / 2 * HEADS + h % 2) + 2 * (j % 2);
        let mut sum = sums[h];
        let mut added = minima[h];
        #[unroll]
        for step in 2..5u32 {
            sum += plane_shuffle_xor(sum, comptime!(1 << step));
            added += plane_shuffle_xor(added, comptime!(1 << step));
        }
        if r == 0 && j < 2 {
            plane_sums[(plane * heads + head) * 2] = sum;
            plane_sums[(plane * heads + head) * 2 + 1] = added;
        }
    }
    sync_cube();
    #[unroll]
    for h in 0..comptime!(2 * head_tiles) {
        let head = comptime!(h / 2 * HEADS + h % 2) + 2 * (j % 2);
        let mut sum = 0.0f32;
        let mut added = 0.0f32;
        #[unroll]
        for p in 0..PLANES.comptime() {
            sum += plane_sums[(comptime!(p * heads) + head) * 2];
            added += plane_sums[(comptime!(p * heads) + head) * 2 + 1];
        }
        let part = (kv_head * ranges.splits + split) * group + head;
        let own = j < 2 && head < group;
        #[unroll]
        for i in 0..comptime!(2 * channel_tiles) {
            let product = values[comptime!((h / 2) * 2 * channel_tiles + i)];
            let product = product.extract(comptime!(h % 2));
            let value = product + plane_shuffle_xor(product, 2u32) + added;
            let tile = comptime!(i / 2 * PLANES) + plane;
            let channel = tile * TILE.comptime() + 2 * r + comptime!(i % 2);
            if own && channel < head_dim {
                parts.values[part * head_dim + channel] = value;
            }
        }
        if own && plane == 0 && r == 0 {
            parts.stats[part * 2] = maxima[h];
            parts.stats[part * 2 + 1] = sum;
        }
    }
}
