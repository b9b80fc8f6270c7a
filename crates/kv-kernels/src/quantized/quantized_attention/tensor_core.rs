//! The kernel of `quantized_attention` for matrix instructions. A plane takes whole blocks of 64
//! slots by itself, and attends to a block in three steps:
//!
//! 1. The lanes multiply the queries by the steps and minima of the keys' channels.
//! 2. Keys: rows are slots, the summed dimension is channels, and columns are query heads. A softmax
//!    over the logits follows.
//! 3. Values: rows are channels, and the summed dimension is slots.
//!
//! Codes go from words to matrix instructions by a shift and a mask: a code `c` becomes the bf16
//! number `1 + c / 2^bits`, a pair of which is in the two halves of a word. The factors, which are
//! queries times steps, and softmax weights times steps, would lose too much in one bf16 number: a
//! factor is the sum of two of them. A product has 8 columns, for the two numbers of 4 query heads.
//!
//! The order of rows and of the summed dimension is free. Lane `4 r + j` has the keys of slots `8 r`
//! to `8 r + 7`, every fourth word of codes from word `j` on; and an eighth of the channels of the
//! values, again every fourth word. In products it has columns `2 j` and `2 j + 1`.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;
use half::bf16;

use super::kernel_args::{Blueprint, Parts, QuantizedRanges};
use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::{larger, weight_of};
use crate::quantized::layout::kernel::{fractions_of, minimum_of, step_of};
use crate::quantized::layout::{BLOCK, codes_of_half, codes_of_word, words};
use crate::quantized::pool::kernel::QuantizedVectors;

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
/// Slots of a block that a lane has, and tiles of 16 slots.
const SLOTS: usize = BLOCK / ROWS;
const TILES: usize = BLOCK / 16;
/// Elements of a vector.
const LANES: usize = 4;
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
        let of_plane = key_pairs * TEAM * self.head_tiles() * COLUMNS
            + self.weight_rows() * heads
            + heads * self.head_dim
            + 3 * heads;
        size_of::<f32>() * (PLANES * of_plane + heads * self.head_dim)
    }
}

#[cube(launch_unchecked)]
pub(super) fn quantized_tiles_kernel<F: Float>(
    queries: &[F],
    scale: f32,
    ranges: &QuantizedRanges,
    pool: &QuantizedVectors,
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
    // Channels of the values that a lane has, in vectors, and tiles of 16 of them.
    let channels = comptime!(head_dim / ROWS);
    let channel_vectors = comptime!(channels / LANES);
    let channel_tiles = comptime!(head_dim / 16);
    let cube = CUBE_POS;
    if cube >= ranges.total_kv_heads * ranges.splits {
        terminate!();
    }
    let kv_head = cube / ranges.splits;
    let split = cube % ranges.splits;
    let offset = max(ranges.offsets[kv_head], 0) as usize / BLOCK.comptime();
    let length = max(ranges.lengths[kv_head], 0) as usize;
    let blocks = length.div_ceil(BLOCK.comptime());
    let share = blocks.div_ceil(ranges.splits);
    let first = min(split * share, blocks);
    let end = min(first + share, blocks);
    let unit = UNIT_POS as usize;
    let (plane, lane) = (unit / PLANE.comptime(), unit % PLANE.comptime());
    let (r, j) = (lane / TEAM.comptime(), lane % TEAM.comptime());

    // The queries; a plane's factors of keys and of values.
    let mut query = Shared::<[f32]>::new_slice(comptime!(heads * head_dim));
    let factors_of_plane = comptime!(key_pairs * TEAM * head_tiles * COLUMNS);
    let mut factors = Shared::<[u32]>::new_slice(comptime!(PLANES * factors_of_plane));
    let weights_of_plane = comptime!(blueprint.weight_rows() * heads);
    let mut weights = Shared::<[f32]>::new_slice(comptime!(PLANES * weights_of_plane));
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
    let mut i = unit;
    while i < comptime!(PLANES * weights_of_plane) {
        weights[i] = 0.0f32;
        i += UNITS.comptime();
    }
    sync_cube();
    let factors_at = plane * factors_of_plane;
    let weights_at = plane * weights_of_plane;

    // Of the heads of columns `2 j` and `2 j + 1`: the maximum so far, and this lane's share of the
    // sum of weights, and of what is added to all channels.
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

    let mut block = first + plane;
    while block < end {
        let at = offset + block;
        // All codes are on their way before the first of them is needed.
        let mut keys = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * own_key_words));
        #[unroll]
        for i in 0..own_key_words {
            let word = min(j + comptime!(TEAM * i), comptime!(key_words - 1));
            let from = (at * key_words + word) * comptime!(BLOCK / LANES) + 2 * r;
            keys[2 * i] = pool.key_codes[from];
            keys[comptime!(2 * i + 1)] = pool.key_codes[from + 1];
        }
        let mut codes =
            Array::<Vector<u32, Const<4>>>::new(comptime!(own_value_words * channel_vectors));
        #[unroll]
        for i in 0..own_value_words {
            let word = min(j + comptime!(TEAM * i), comptime!(value_words - 1));
            let from =
                (at * value_words + word) * comptime!(head_dim / LANES) + r * channel_vectors;
            #[unroll]
            for v in 0..channel_vectors {
                codes[i * channel_vectors + v] = pool.value_codes[from + v];
            }
        }
        let scales_at = at * comptime!(BLOCK / LANES) + 2 * r;
        let mut scales = Array::<Vector<u32, Const<4>>>::new(2usize);
        scales[0] = pool.value_scales[scales_at];
        scales[1] = pool.value_scales[scales_at + 1];

        // `2^bits q_d s_d`, and the sums over channels of `q_d m_d` less these factors.
        let mut bases = Array::<f32>::new(head_tiles);
        #[unroll]
        for n in 0..head_tiles {
            bases[n] = 0.0f32;
        }
        #[unroll]
        for step in 0..comptime!((key_pairs * TEAM).div_ceil(ROWS)) {
            let pair = comptime!(step * ROWS) + r;
            if comptime!((step + 1) * ROWS <= key_pairs * TEAM)
                || pair < comptime!(key_pairs * TEAM)
            {
                let (of_lane, team) = (pair / TEAM.comptime(), pair % TEAM.comptime());
                let word = team + TEAM.comptime() * (of_lane / key_half);
                let low = word * comptime!(2 * key_half) + of_lane % key_half;
                let high = low + key_half;
                let low_scale = pool.key_scales[at * head_dim + min(low, comptime!(head_dim - 1))];
                let high_scale =
                    pool.key_scales[at * head_dim + min(high, comptime!(head_dim - 1))];
                #[unroll]
                for n in 0..head_tiles {
                    let row = (comptime!(n * HEADS) + j) * head_dim;
                    let to = factors_at + (pair * head_tiles + n) * COLUMNS.comptime() + j;
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
                    bases[n] +=
                        q_low * minimum_of(low_scale) + q_high * minimum_of(high_scale) - a - b;
                }
            }
        }
        sync_plane();

        // Keys: `logits[4 tile + 2 side + e]` is of slot `8 r + 2 tile + side` and column `2 j + e`.
        let mut logits = Array::<f32>::new(comptime!(2 * SLOTS * head_tiles));
        #[unroll]
        for n in 0..head_tiles {
            let mut products = Array::<Vector<f32, Const<2>>>::new(comptime!(2 * TILES));
            #[unroll]
            for i in 0..comptime!(2 * TILES) {
                products[i] = Vector::new(0.0f32);
            }
            #[unroll]
            for m in 0..comptime!(key_pairs.div_ceil(2)) {
                let mut column = Array::<Vector<bf16, Const<2>>>::new(2usize);
                #[unroll]
                for side in 0..2usize {
                    let pair = comptime!(2 * m + side);
                    let mut factor = 0u32;
                    if comptime!(pair < key_pairs) {
                        let row = comptime!(pair * TEAM) + j;
                        factor =
                            factors[factors_at + (row * head_tiles + n) * COLUMNS.comptime() + r];
                    }
                    column[side] = Vector::reinterpret(factor);
                }
                #[unroll]
                for tile in 0..TILES.comptime() {
                    let mut rows = Array::<Vector<bf16, Const<2>>>::new(4usize);
                    #[unroll]
                    for part in 0..4usize {
                        // Rows `r` and `r + 8` of the left half, then of the right half.
                        let pair = comptime!((2 * m + part / 2).min(key_pairs - 1));
                        let slot = comptime!(2 * tile + part % 2);
                        let of_word = comptime!(2 * (pair / key_half) + slot / LANES);
                        let word = keys[of_word].extract(comptime!(slot % LANES));
                        let pair = fractions_of(word, comptime!(pair % key_half), key_bits);
                        rows[part] = Vector::reinterpret(pair);
                    }
                    let mut sums = Array::<Vector<f32, Const<2>>>::new(2usize);
                    sums[0] = products[comptime!(2 * tile)];
                    sums[1] = products[comptime!(2 * tile + 1)];
                    sums = def.execute(&rows, &column, &sums);
                    products[comptime!(2 * tile)] = sums[0];
                    products[comptime!(2 * tile + 1)] = sums[1];
                }
            }
            let mut base = bases[n];
            #[unroll]
            for step in 2..5u32 {
                base += plane_shuffle_xor(base, comptime!(1 << step));
            }
            #[unroll]
            for e in 0..2usize {
                let of_column = plane_shuffle(base, (2 * j as u32 + comptime!(e as u32)) % 4u32);
                #[unroll]
                for s in 0..SLOTS.comptime() {
                    let own = products[s].extract(e);
                    let logit = own + plane_shuffle_xor(own, 2u32) + of_column;
                    let there = block * BLOCK.comptime() + r * SLOTS.comptime() + s < length;
                    logits[comptime!((n * 2 + e) * SLOTS + s)] =
                        select(there, logit, f32::new(LOWEST_LOGIT));
                }
            }
        }

        // Softmax. Lanes `j` and `j + 2` of a team have the logits of the first two heads of a
        // product, or of the last two.
        #[unroll]
        for h in 0..comptime!(2 * head_tiles) {
            let mut top = maxima[h];
            #[unroll]
            for s in 0..SLOTS.comptime() {
                top = larger(top, logits[comptime!(h * SLOTS + s)]);
            }
            #[unroll]
            for step in 2..5u32 {
                top = larger(top, plane_shuffle_xor(top, comptime!(1 << step)));
            }
            let factor = weight_of(maxima[h], top);
            maxima[h] = top;
            let (mut sum, mut added) = (sums[h] * factor, minima[h] * factor);
            let head = comptime!(h / 2 * HEADS + h % 2) + 2 * (j % 2);
            #[unroll]
            for s in 0..SLOTS.comptime() {
                let logit = logits[comptime!(h * SLOTS + s)];
                let there = block * BLOCK.comptime() + r * SLOTS.comptime() + s < length;
                let weight = select(there, weight_of(logit, top), 0.0f32);
                let scale = scales[comptime!(s / LANES)].extract(comptime!(s % LANES));
                // A step may be NaN where the slot is behind the end.
                let stepped = weight * step_of(scale) * f32::new(value_unit);
                let stepped = select(there, rounded(stepped), 0.0f32);
                sum += weight;
                added += select(there, weight * minimum_of(scale), 0.0f32) - stepped;
                if j < 2 {
                    weights[weights_at + (r * SLOTS.comptime() + s) * heads + head] = stepped;
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
        sync_plane();

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
                            let of = weights_at + low * heads + comptime!(n * HEADS) + r % 4;
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
                    for part in 0..4usize {
                        let pair = comptime!((2 * m + part / 2).min(value_pairs - 1));
                        let channel = comptime!(2 * tile + part % 2);
                        let of_word =
                            comptime!(pair / value_half * channel_vectors + channel / LANES);
                        let word = codes[of_word].extract(comptime!(channel % LANES));
                        let pair = fractions_of(word, comptime!(pair % value_half), value_bits);
                        rows[part] = Vector::reinterpret(pair);
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
        // The next block's factors and weights take the place of these.
        sync_plane();
        block += PLANES.comptime();
    }

    // The planes' sums are reduced.
    let mut plane_stats = Shared::<[f32]>::new_slice(comptime!(PLANES * heads * 2));
    let mut rows = Shared::<[f32]>::new_slice(comptime!(PLANES * heads * head_dim));
    #[unroll]
    for h in 0..comptime!(2 * head_tiles) {
        let (mut sum, mut added) = (sums[h], minima[h]);
        #[unroll]
        for step in 2..5u32 {
            sum += plane_shuffle_xor(sum, comptime!(1 << step));
            added += plane_shuffle_xor(added, comptime!(1 << step));
        }
        let head = comptime!(h / 2 * HEADS + h % 2) + 2 * (j % 2);
        if r == 0 && j < 2 {
            plane_stats[(plane * heads + head) * 2] = maxima[h];
            plane_stats[(plane * heads + head) * 2 + 1] = sum;
        }
        #[unroll]
        for i in 0..comptime!(2 * channel_tiles) {
            let own = values[comptime!((h / 2) * 2 * channel_tiles + i)].extract(comptime!(h % 2));
            let value = own + plane_shuffle_xor(own, 2u32) + added;
            if j < 2 {
                rows[(plane * heads + head) * head_dim + r * channels + i] = value;
            }
        }
    }
    sync_cube();
    let mut i = unit;
    while i < comptime!(group * head_dim) {
        let (head, channel) = (i / head_dim, i % head_dim);
        let mut top = f32::new(LOWEST_LOGIT);
        #[unroll]
        for p in 0..PLANES.comptime() {
            top = larger(top, plane_stats[(p * heads + head) * 2]);
        }
        let mut sum = 0.0f32;
        let mut value = 0.0f32;
        #[unroll]
        for p in 0..PLANES.comptime() {
            let factor = weight_of(plane_stats[(p * heads + head) * 2], top);
            sum += plane_stats[(p * heads + head) * 2 + 1] * factor;
            value += rows[(p * heads + head) * head_dim + channel] * factor;
        }
        let part = (kv_head * ranges.splits + split) * group + head;
        parts.values[part * head_dim + channel] = value;
        if channel == 0 {
            parts.stats[part * 2] = top;
            parts.stats[part * 2 + 1] = sum;
        }
        i += UNITS.comptime();
    }
}

/// The leading bits of a number, which bf16 has room for.
#[cube]
fn lead(x: f32) -> f32 {
    f32::reinterpret(u32::reinterpret(x) & 0xffff_0000u32)
}

/// A number rounded to what the sum of two bf16 numbers holds. Without the rounding, factors would
/// all be too small, and their errors would add up.
#[cube]
fn rounded(x: f32) -> f32 {
    let leading = lead(x);
    let rest = u32::reinterpret(x - leading) + 0x8000u32;
    leading + f32::reinterpret(rest & 0xffff_0000u32)
}

/// A pair of bf16 numbers, of the upper halves of two f32.
#[cube]
fn packed(low: f32, high: f32) -> u32 {
    (u32::reinterpret(low) >> 16u32) | (u32::reinterpret(high) & 0xffff_0000u32)
}
