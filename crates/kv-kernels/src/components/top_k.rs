//! Radix select: finds the highest numbers of a row without sorting, one cube a row. Top-k, top-p
//! and similar kernels share it.
//!
//! Numbers are ordered by value, and equal numbers by index, where the lower index is higher. So no
//! two numbers have one place in the order. [`threshold`] finds the place from which on the numbers
//! reach a count or a weight. It finds the place digit by digit, first in the numbers' sort keys
//! and then in their index keys.

use cubecl::prelude::*;

use super::sort_key::{INDEX_BITS, index_key, not_below, sort_key};

/// Values of a digit of four bits, except 0.
pub(crate) const STEPS: usize = 15;

/// Comptime configuration of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Search {
    /// Units of a cube.
    pub(crate) units: usize,
    /// The most planes of a cube.
    pub(crate) planes: usize,
    /// Whether a number counts by its softmax weight, as a logit; otherwise it counts as 1.
    pub(crate) weighted: bool,
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
    /// The totals of each plane, `[planes, STEPS]`.
    parts: Shared<[f32]>,
    /// The totals of the cube, `[STEPS]`.
    pub(crate) totals: Shared<[f32]>,
}

#[cube]
impl Counts {
    /// Shared memory for the totals of at most `planes` planes.
    pub(crate) fn room(#[comptime] planes: usize) -> Counts {
        Counts {
            parts: Shared::<[f32]>::new_slice(comptime!(STEPS * planes)),
            totals: Shared::<[f32]>::new_slice(STEPS),
        }
    }
}

/// The highest place from which on the row's numbers reach `wanted`, in count or in weight. Numbers
/// below `floor` do not count. `numbers` are in vectors.
#[cube]
pub(crate) fn threshold<N: Size>(
    numbers: &[Vector<f32, N>],
    counts: &mut Counts,
    row: &RankedRow,
    wanted: f32,
    floor: &Place,
    #[comptime] search: Search,
) -> Place {
    let mut own = Array::<f32>::new(STEPS);
    let mut high = 0u32;
    let mut low = 0u32;
    // The total of all numbers above the places that have the digits found so far.
    let mut above = 0.0f32;
    for digit in 0..comptime!(8 + INDEX_BITS / 4) {
        let of_high = digit < 8;
        let shift = select(of_high, 28 - 4 * digit, comptime!(INDEX_BITS + 28) - 4 * digit);
        let digit = Digit { high, low, of_high, shift };
        measure_digit(numbers, &mut own, row, &digit, floor, search);
        add_up(&own, counts, search);
        let mut value = 0u32;
        #[unroll]
        for step in 0..STEPS {
            value += select(above + counts.totals[step] >= wanted, 1u32, 0u32);
        }
        if value < STEPS as u32 {
            above += counts.totals[value as usize];
        }
        if of_high {
            high |= value << shift;
        } else {
            low |= value << shift;
        }
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

/// Sums this unit's numbers that have the digits found so far: `own[i]` is the total of the numbers
/// whose digit at `shift` is greater than `i`.
#[cube]
fn measure_digit<N: Size>(
    numbers: &[Vector<f32, N>],
    own: &mut Array<f32>,
    row: &RankedRow,
    digit: &Digit,
    floor: &Place,
    #[comptime] search: Search,
) {
    let (high, low, of_high, shift) = (digit.high, digit.low, digit.of_high, digit.shift);
    #[unroll]
    for step in 0..STEPS {
        own[step] = 0.0f32;
    }
    let mut at = UNIT_POS as usize;
    while at < row.columns {
        let vector = numbers[row.start + at];
        #[unroll]
        for lane in 0..N::value() {
            let number = vector.extract(lane);
            let index = at * N::value() + lane;
            let own_high = sort_key(number);
            let own_low = index_key(index);
            // The digits above this one must equal those found so far.
            let mut key = own_low;
            let mut same = own_high == high && (own_low ^ low) >> shift < 16;
            if of_high {
                key = own_high;
                same = (own_high ^ high) >> shift < 16;
            }
            if same && index < row.length && not_below(own_high, own_low, floor.high, floor.low) {
                let mut amount = 1.0f32;
                if search.weighted {
                    amount = weight(number, row.max, row.temperature);
                }
                let value = (key >> shift) & 15u32;
                #[unroll]
                for step in 0..STEPS {
                    own[step] += select(value > comptime!(step as u32), amount, 0.0f32);
                }
            }
        }
        at += search.units.comptime();
    }
}

/// Sums a row's numbers from a place on. The result is the first of the totals.
#[cube]
pub(crate) fn total_from<N: Size>(
    numbers: &[Vector<f32, N>],
    counts: &mut Counts,
    row: &RankedRow,
    from: &Place,
    #[comptime] search: Search,
) {
    let mut own = Array::<f32>::new(STEPS);
    #[unroll]
    for step in 0..STEPS {
        own[step] = 0.0f32;
    }
    let mut at = UNIT_POS as usize;
    while at < row.columns {
        let vector = numbers[row.start + at];
        #[unroll]
        for lane in 0..N::value() {
            let number = vector.extract(lane);
            let index = at * N::value() + lane;
            let key = sort_key(number);
            if index < row.length && not_below(key, index_key(index), from.high, from.low) {
                let mut amount = 1.0f32;
                if search.weighted {
                    amount = weight(number, row.max, row.temperature);
                }
                own[0] += amount;
            }
        }
        at += search.units.comptime();
    }
    add_up(&own, counts, search);
}

/// Sums each of the 15 totals over the cube.
#[cube]
fn add_up(own: &Array<f32>, counts: &mut Counts, #[comptime] search: Search) {
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    #[unroll]
    for step in 0..STEPS {
        let of_plane = plane_sum(own[step]);
        if UNIT_POS_PLANE == 0 {
            counts.parts[plane * STEPS + step] = of_plane;
        }
    }
    sync_cube();
    let unit = UNIT_POS as usize;
    if unit < STEPS {
        let planes = (comptime!(search.units as u32) / PLANE_DIM) as usize;
        let mut total = 0.0f32;
        for plane in 0..planes {
            total += counts.parts[plane * STEPS + unit];
        }
        counts.totals[unit] = total;
    }
    sync_cube();
}
