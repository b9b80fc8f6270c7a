//! The kernel of `archived_attention`: one plane a part. A plane takes every so many slots of a
//! range that have come back, and every so many blocks' means; a unit has some of the channels. All
//! reads of some slots are under way before the first is waited for, since host memory answers
//! late.

use burn::tensor::DType;
use cubecl::prelude::*;

use crate::archive::layout::kernel::{first_of, second_of};
use crate::archive::layout::{BLOCK, row_words};
use crate::archive::pool::kernel::ArchivedSlots;
use crate::attention::continued::combine::Parts;
use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::{larger, weight_of};

/// Units of a cube.
pub(super) const UNITS: usize = 128;
/// Slots that a plane reads before it waits for the first of them.
pub(super) const AHEAD: usize = 4;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    pub(super) group: usize,
    pub(super) head_dim: usize,
    /// The dtype of the rows' numbers.
    pub(super) dtype: DType,
    /// The least units of a plane.
    pub(super) plane: usize,
    /// The most planes of a cube.
    pub(super) planes: usize,
    /// Whether slots come back.
    pub(super) revives: bool,
}

impl Blueprint {
    /// Numbers of a word of a row.
    fn numbers(self) -> usize {
        4 / self.dtype.size()
    }

    /// Words of a row that a unit has.
    fn words(self) -> usize {
        row_words(self.head_dim, self.dtype.size()).div_ceil(self.plane)
    }
}

/// The ranges, and the slots of each that have come back.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ChosenSlots {
    /// First slots, `[B, Hkv]`.
    offsets: Box<[i32]>,
    /// `[B, Hkv]`
    lengths: Box<[i32]>,
    /// Slots of each range, `[B * Hkv, most]`.
    chosen: Box<[i32]>,
    /// `[B * Hkv]`
    counts: Box<[i32]>,
    most: usize,
    /// `B * Hkv`
    ranges: usize,
    /// Cubes of a range.
    cubes: usize,
}

/// The running softmax of a group's query heads. A unit holds some channels of the sums.
#[derive(CubeType)]
struct Running {
    /// `[G, channels]`, with the factor of logits.
    queries: Array<f32>,
    maxima: Array<f32>,
    sums: Array<f32>,
    /// `[G, channels]`
    values: Array<f32>,
    #[cube(comptime)]
    group: usize,
    /// Channels of a unit.
    #[cube(comptime)]
    channels: usize,
}

#[cube]
impl Running {
    /// Adds a slot, by this unit's channels of its key and value. All units of the plane take part.
    fn add(&mut self, key: &Array<f32>, value: &Array<f32>, bonus: f32) {
        let channels = comptime!(self.channels);
        #[unroll]
        for g in 0..self.group {
            let mut part = 0.0f32;
            #[unroll]
            for i in 0..channels {
                part += self.queries[g * channels + i] * key[i];
            }
            let logit = plane_sum(part) + bonus;
            let top = larger(self.maxima[g], logit);
            let factor = weight_of(self.maxima[g], top);
            let weight = weight_of(logit, top);
            self.maxima[g] = top;
            self.sums[g] = self.sums[g] * factor + weight;
            #[unroll]
            for i in 0..channels {
                let at = g * channels + i;
                self.values[at] = self.values[at] * factor + weight * value[i];
            }
        }
    }
}

#[cube(launch_unchecked)]
pub(super) fn archived_attention_kernel<F: Float>(
    queries: &[F],
    scale: f32,
    slots: &ChosenSlots,
    pool: &ArchivedSlots,
    parts: &mut Parts,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let Blueprint { group, head_dim, dtype, planes, revives, .. } = blueprint;
    let numbers = comptime!(blueprint.numbers());
    let own_words = comptime!(blueprint.words());
    let channels = comptime!(own_words * numbers);
    let row_words = comptime!(row_words(head_dim, dtype.size()));
    let mean_words = comptime!(head_dim.div_ceil(2));
    let cube = CUBE_POS;
    if cube >= slots.ranges * slots.cubes {
        terminate!();
    }
    let (range, within) = (cube / slots.cubes, cube % slots.cubes);
    let lane = UNIT_POS_PLANE as usize;
    let width = PLANE_DIM as usize;
    let cube_planes = CUBE_DIM as usize / width;
    let (first, step) = (within * cube_planes + PLANE_POS as usize, slots.cubes * cube_planes);
    let offset = max(slots.offsets[range], 0) as usize;
    let blocks = max(slots.lengths[range], 0) as usize / BLOCK.comptime();
    let list = range * slots.most;
    let mut count = 0usize;
    if comptime!(revives) {
        count = max(slots.counts[range], 0) as usize;
    }

    let mut running = Running {
        queries: Array::new(comptime!(group * channels)),
        maxima: Array::new(group),
        sums: Array::new(group),
        values: Array::new(comptime!(group * channels)),
        group,
        channels,
    };
    #[unroll]
    for g in 0..group {
        running.maxima[g] = f32::new(LOWEST_LOGIT);
        running.sums[g] = 0.0f32;
        #[unroll]
        for i in 0..channels {
            let channel = (lane + i / numbers * width) * numbers + i % numbers;
            let mut q = 0.0f32;
            if channel < head_dim {
                q = f32::cast_from(queries[(range * group + g) * head_dim + channel]) * scale;
            }
            running.queries[g * channels + i] = q;
            running.values[g * channels + i] = 0.0f32;
        }
    }
    let mut key = Array::<f32>::new(channels);
    let mut value = Array::<f32>::new(channels);

    // Slots that have come back.
    let mut key_words = Array::<u32>::new(comptime!(AHEAD * own_words));
    let mut value_words = Array::<u32>::new(comptime!(AHEAD * own_words));
    let mut task = first;
    while task < count {
        #[unroll]
        for a in 0..AHEAD.comptime() {
            if task + a * step < count {
                let slot = offset + max(slots.chosen[list + task + a * step], 0) as usize;
                #[unroll]
                for i in 0..own_words {
                    let word = min(lane + i * width, comptime!(row_words - 1));
                    let from = slot * comptime!(2 * row_words) + word;
                    key_words[a * own_words + i] = pool.rows.read(from);
                    value_words[a * own_words + i] = pool.rows.read(from + row_words);
                }
            }
        }
        #[unroll]
        for a in 0..AHEAD.comptime() {
            if task + a * step < count {
                #[unroll]
                for i in 0..own_words {
                    unpack(key_words[a * own_words + i], &mut key, i * numbers, dtype);
                    unpack(value_words[a * own_words + i], &mut value, i * numbers, dtype);
                }
                running.add(&key, &value, 0.0f32);
            }
        }
        task += AHEAD.comptime() * step;
    }

    // Blocks' means, beginning with the planes that have the fewest slots.
    let mut block = (first + step - count % step) % step;
    while block < blocks {
        let mut mine = 0u32;
        let mut at = lane;
        while at < count {
            if max(slots.chosen[list + at], 0) as usize / BLOCK.comptime() == block {
                mine += 1u32;
            }
            at += width;
        }
        let back = plane_sum(mine);
        let at = offset / BLOCK.comptime() + block;
        #[unroll]
        for i in 0..channels {
            let channel = (lane + i / numbers * width) * numbers + i % numbers;
            let within = min(channel, comptime!(head_dim - 1));
            key[i] = first_of(pool.key_statistics[at * head_dim + within]);
            let word = pool.value_means[at * mean_words + within / 2];
            value[i] = select(within % 2 == 0, first_of(word), second_of(word));
        }
        let others = f32::cast_from(u32::cast_from(BLOCK.comptime()) - back);
        if others > 0.5f32 {
            running.add(&key, &value, others.ln());
        }
        block += step;
    }

    // Planes that this cube could have and has not leave empty parts.
    let mut plane = PLANE_POS as usize;
    while plane < planes {
        let own = plane == PLANE_POS as usize;
        #[unroll]
        for g in 0..group {
            let part = ((range * slots.cubes + within) * planes + plane) * group + g;
            if lane == 0 {
                parts.stats[part * 2] = select(own, running.maxima[g], f32::new(LOWEST_LOGIT));
                parts.stats[part * 2 + 1] = select(own, running.sums[g], 0.0f32);
            }
            #[unroll]
            for i in 0..channels {
                let channel = (lane + i / numbers * width) * numbers + i % numbers;
                if channel < head_dim {
                    let sum = select(own, running.values[g * channels + i], 0.0f32);
                    parts.values[part * head_dim + channel] = sum;
                }
            }
        }
        plane += cube_planes;
    }
}

/// Writes the numbers of a word to `to`, from `at` on.
#[cube]
fn unpack(word: u32, to: &mut Array<f32>, #[comptime] at: usize, #[comptime] dtype: DType) {
    match comptime!(dtype) {
        DType::F16 => {
            to[at] = half_of(word & 0xffffu32);
            to[at + 1] = half_of(word >> 16u32);
        }
        DType::BF16 => {
            to[at] = first_of(word);
            to[at + 1] = second_of(word);
        }
        _ => to[at] = f32::reinterpret(word),
    }
}

/// The f16 number of 16 bits. WGSL compilers do not reinterpret a word as two of them.
#[cube]
fn half_of(bits: u32) -> f32 {
    let size = bits & 0x7fffu32;
    // Below the least exponent, numbers are multiples of 2^-24.
    let small = u32::reinterpret(f32::cast_from(size) * f32::new(comptime!(2.0f32.powi(-24))));
    let large = select(
        size < 0x7c00u32,
        (size << 13u32) + (112u32 << 23u32),
        size << 13u32 | 0x7f80_0000u32,
    );
    let number = select(size < 0x400u32, small, large);
    f32::reinterpret(number | (bits & 0x8000u32) << 16u32)
}
