//! Radix select: finds the highest numbers of a row without sorting, one cube a row. Top-k, top-p
//! and similar kernels share it.
//!
//! Numbers are ordered by value, and equal numbers by index, where the lower index is higher. So no
//! two numbers have one place in the order. [`threshold`] finds the place from which on the numbers
//! reach a count or a weight. It finds the place digit by digit, first in the numbers' sort keys
//! and then in their index keys:
//!
//! 1. Each unit sums its numbers by the value of the digit. Only numbers that have the digits found
//!    so far take part.
//! 2. The cube adds up the units' sums.
//! 3. The digit is the highest value from which on the numbers reach what is wanted.
//!
//! The search ends early where all numbers that have the digits found so far are wanted.

use cubecl::client::Client;
use cubecl::prelude::*;

use super::sort_key::{INDEX_BITS, index_key, not_below, sort_key};

/// Bits of a digit, and its values.
const BITS: u32 = 4;
pub(crate) const VALUES: usize = 1 << BITS;
/// Digits of a place.
const DIGITS: u32 = (u32::BITS + INDEX_BITS) / BITS;

/// What numbers count for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Amounts {
    /// A number counts as 1. Counts of several digits share a word of 32 bits, as many as there is
    /// room for: this saves most of the exchanges between the units of a plane.
    Ones { of_word: usize },
    /// A number, as a logit, counts by its softmax weight.
    Weights,
}

impl Amounts {
    /// Counts of 1, where each unit of a device has at most `own` numbers of a row.
    pub(crate) fn ones(client: &Client, own: usize) -> Self {
        let plane = client.properties().hardware.plane_size_max as usize;
        let of_word = match own * plane {
            0..=0xff => 4,
            0x100..=0xffff => 2,
            _ => 1,
        };
        Self::Ones { of_word }
    }
}

/// Comptime configuration of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Search {
    /// Units of a cube.
    pub(crate) units: usize,
    /// The most planes of a cube.
    pub(crate) planes: usize,
    pub(crate) amounts: Amounts,
}

/// The weight of a logit relative to the highest logit, whose weight is 1.
#[cube]
pub(crate) fn weight(logit: f32, max: f32, temperature: f32) -> f32 {
    let mut weight = 1.0f32;
    if logit < max {
        weight = ((logit - max) / temperature).exp();
    }
    weight
}

/// A row of numbers.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RankedRow {
    /// The row's first vector.
    pub(crate) start: usize,
    /// Vectors of the row.
    pub(crate) columns: usize,
    /// Numbers that count, from the row's first number on.
    pub(crate) length: usize,
    /// The highest number that counts, and the temperature that divides the distance from it; for
    /// [`weight`].
    pub(crate) max: f32,
    pub(crate) temperature: f32,
}

/// A place in the order of numbers: a sort key and an index key.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) high: u32,
    pub(crate) low: u32,
}

/// Shared memory of a search.
#[derive(CubeType)]
pub(crate) struct Counts {
    /// The totals of each plane by the digit's value, `[planes, VALUES]`.
    parts: Shared<[f32]>,
    /// The totals of the cube, `[VALUES]`.
    pub(crate) totals: Shared<[f32]>,
}

#[cube]
impl Counts {
    /// Shared memory for the totals of at most `planes` planes.
    pub(crate) fn room(#[comptime] planes: usize) -> Counts {
        Counts {
            parts: Shared::<[f32]>::new_slice(comptime!(VALUES * planes)),
            totals: Shared::<[f32]>::new_slice(VALUES),
        }
    }

    /// Adds up the totals of the planes. The first `values` of them are of interest. A plane adds up
    /// a value: one unit that added up all planes' totals would read them one after another.
    fn add_up(&mut self, #[comptime] values: usize, #[comptime] units: usize) {
        sync_cube();
        let (lane, width) = (UNIT_POS_PLANE as usize, PLANE_DIM as usize);
        let planes = units.comptime() / width;
        let mut value = (UNIT_POS / PLANE_DIM) as usize;
        while value < values {
            let mut own = 0.0f32;
            let mut plane = lane;
            while plane < planes {
                own += self.parts[plane * VALUES + value];
                plane += width;
            }
            let total = plane_sum(own);
            if lane == 0 {
                self.totals[value] = total;
            }
            value += planes;
        }
        sync_cube();
    }
}

/// The highest place from which on the row's numbers reach `wanted`, in count or in weight, or a
/// lower place from which on they are the same numbers. Where weights are summed, numbers below
/// `floor` do not count. `numbers` are in vectors.
#[cube]
pub(crate) fn threshold<N: Size>(
    numbers: &[Vector<f32, N>],
    counts: &mut Counts,
    row: &RankedRow,
    wanted: f32,
    floor: &Place,
    #[comptime] search: Search,
) -> Place {
    let mut high = 0u32;
    let mut low = 0u32;
    // The total of all numbers above the places that have the digits found so far.
    let mut above = 0.0f32;
    let mut digit = 0u32;
    while digit < DIGITS {
        let of_high = digit < comptime!(u32::BITS / BITS);
        let first =
            select(of_high, comptime!(u32::BITS - BITS), comptime!(u32::BITS + INDEX_BITS - BITS));
        let shift = first - BITS * digit;
        let own = Digit { high, low, of_high, shift };
        match comptime!(search.amounts) {
            Amounts::Ones { of_word } => {
                count_values(numbers, counts, row, &own, of_word, search.units);
            }
            Amounts::Weights => weigh_values(numbers, counts, row, &own, floor, search.units),
        }
        counts.add_up(VALUES, search.units);
        // Of the values from the highest down, as many as are needed.
        let mut value = u32::new(comptime!(VALUES as i64 - 1));
        let mut from = above + counts.totals[comptime!(VALUES - 1)];
        #[unroll]
        for step in 1..VALUES {
            let next = comptime!(VALUES - 1 - step);
            if from < wanted {
                above = from;
                from += counts.totals[next];
                value = u32::new(comptime!(next as i64));
            }
        }
        if of_high {
            high |= value << shift;
        } else {
            low |= value << shift;
        }
        digit = select(from <= wanted, DIGITS, digit + 1);
        sync_cube();
    }
    Place { high, low }
}

/// The digit of the place that is searched for.
#[derive(CubeType, Clone, Copy)]
struct Digit {
    /// The digits of the place found so far.
    high: u32,
    low: u32,
    /// Whether the digit belongs to the sort key; otherwise it belongs to the index key.
    of_high: bool,
    /// The digit's lowest bit.
    shift: u32,
}

#[cube]
impl Digit {
    /// The digit's value in a number of the row; [`VALUES`] where other digits differ from the ones
    /// found so far, or the number is behind the row's end.
    fn value(&self, number: f32, index: usize, row: &RankedRow) -> u32 {
        let high = sort_key(number);
        let mut key = high;
        let mut same = (high ^ self.high) >> self.shift < VALUES as u32;
        if !self.of_high {
            key = index_key(index);
            same = high == self.high && (key ^ self.low) >> self.shift < VALUES as u32;
        }
        select(same && index < row.length, (key >> self.shift) % VALUES as u32, VALUES as u32)
    }
}

/// Counts each plane's numbers by the digit's value. `of_word` counts share a word.
#[cube]
fn count_values<N: Size>(
    numbers: &[Vector<f32, N>],
    counts: &mut Counts,
    row: &RankedRow,
    digit: &Digit,
    #[comptime] of_word: usize,
    #[comptime] units: usize,
) {
    let words = comptime!(VALUES / of_word);
    let bits = comptime!(u32::BITS / of_word as u32);
    let mut own = Array::<u32>::new(words);
    #[unroll]
    for word in 0..words {
        own[word] = 0u32;
    }
    let mut at = UNIT_POS as usize;
    while at < row.columns {
        let vector = numbers[row.start + at];
        #[unroll]
        for lane in 0..N::value() {
            let value = digit.value(vector.extract(lane), at * N::value() + lane, row);
            // Behind the first digits few numbers take part.
            if value < VALUES as u32 {
                let one = 1u32 << (value % comptime!(of_word as u32) * bits);
                #[unroll]
                for word in 0..words {
                    let is_own = value / comptime!(of_word as u32) == comptime!(word as u32);
                    own[word] += select(is_own, one, 0u32);
                }
            }
        }
        at += units;
    }
    #[unroll]
    for word in 0..words {
        own[word] = plane_sum(own[word]);
    }
    // Each unit takes a value's count out of its word.
    let first = (UNIT_POS / PLANE_DIM) as usize * VALUES;
    let mut value = UNIT_POS_PLANE;
    while value < VALUES as u32 {
        let mut word = own[0];
        #[unroll]
        for other in 1..words {
            let is_own = value / comptime!(of_word as u32) == comptime!(other as u32);
            word = select(is_own, own[other], word);
        }
        let count = word >> (value % comptime!(of_word as u32) * bits);
        let count = count & comptime!(u32::MAX >> (u32::BITS - bits));
        counts.parts[first + value as usize] = f32::cast_from(count);
        value += PLANE_DIM;
    }
}

/// Sums the weights of each plane's numbers by the digit's value.
#[cube]
fn weigh_values<N: Size>(
    numbers: &[Vector<f32, N>],
    counts: &mut Counts,
    row: &RankedRow,
    digit: &Digit,
    floor: &Place,
    #[comptime] units: usize,
) {
    let mut own = Array::<f32>::new(VALUES);
    #[unroll]
    for value in 0..VALUES {
        own[value] = 0.0f32;
    }
    let mut at = UNIT_POS as usize;
    while at < row.columns {
        let vector = numbers[row.start + at];
        #[unroll]
        for lane in 0..N::value() {
            let number = vector.extract(lane);
            let index = at * N::value() + lane;
            let value = digit.value(number, index, row);
            let above = not_below(sort_key(number), index_key(index), floor.high, floor.low);
            if value < VALUES as u32 && above {
                let amount = weight(number, row.max, row.temperature);
                #[unroll]
                for other in 0..VALUES {
                    own[other] += select(value == comptime!(other as u32), amount, 0.0f32);
                }
            }
        }
        at += units;
    }
    let first = (UNIT_POS / PLANE_DIM) as usize * VALUES;
    #[unroll]
    for value in 0..VALUES {
        let of_plane = plane_sum(own[value]);
        if UNIT_POS_PLANE == 0 {
            counts.parts[first + value] = of_plane;
        }
    }
}

/// Sums the weights of a row's numbers from a place on. The result is the first of the totals.
#[cube]
pub(crate) fn weight_from<N: Size>(
    numbers: &[Vector<f32, N>],
    counts: &mut Counts,
    row: &RankedRow,
    from: &Place,
    #[comptime] search: Search,
) {
    let mut own = 0.0f32;
    let mut at = UNIT_POS as usize;
    while at < row.columns {
        let vector = numbers[row.start + at];
        #[unroll]
        for lane in 0..N::value() {
            let number = vector.extract(lane);
            let index = at * N::value() + lane;
            if index < row.length
                && not_below(sort_key(number), index_key(index), from.high, from.low)
            {
                own += weight(number, row.max, row.temperature);
            }
        }
        at += search.units.comptime();
    }
    let of_plane = plane_sum(own);
    if UNIT_POS_PLANE == 0 {
        counts.parts[(UNIT_POS / PLANE_DIM) as usize * VALUES] = of_plane;
    }
    counts.add_up(1usize, search.units);
}
