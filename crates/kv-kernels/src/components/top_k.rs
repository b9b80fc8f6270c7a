//! What kernels share that keep the highest numbers of a row, one cube a row, without sorting.
//!
//! Numbers stand in their order and, among equals, from the highest index to the lowest: no two
//! stand together. The place from which on numbers come to some count, or some weight, is found
//! digit by digit, in the numbers' bits and then in the indices'.

use cubecl::prelude::*;

use super::sort_key::{INDEX_BITS, index_key, not_below, sort_key};

/// Values of a digit of four bits, but for 0.
pub(crate) const STEPS: usize = 15;

/// What fixes the generated code of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Search {
    /// Units of a cube.
    pub(crate) units: usize,
    /// Planes of a cube, at most.
    pub(crate) planes: usize,
    /// Whether numbers count by their weight, as logits, rather than one each.
    pub(crate) weighted: bool,
}

/// A logit's weight beside the highest one's, which is 1.
#[cube]
pub(crate) fn weight(logit: f32, max: f32, temperature: f32) -> f32 {
    let mut weight = 1.0f32;
    if logit < max {
        weight = ((logit - max) / temperature).exp();
    }
    weight
}

/// The highest place `(high, low)` from which on a row's first `length` numbers, but for those
/// below the floor, come to `wanted`: in count, or in weight.
///
/// # Shapes
/// `numbers` in vectors, `columns` of them from `start` on.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn threshold<N: Size>(
    numbers: &[Vector<f32, N>],
    parts: &mut Shared<[f32]>,
    totals: &mut Shared<[f32]>,
    start: usize,
    columns: usize,
    length: usize,
    max: f32,
    temperature: f32,
    wanted: f32,
    floor_high: u32,
    floor_low: u32,
    #[comptime] search: Search,
) -> Vector<u32, Const<2>> {
    let mut own = Array::<f32>::new(STEPS);
    let mut high = 0u32;
    let mut low = 0u32;
    // What lies above all places that the digits so far leave.
    let mut above = 0.0f32;
    for digit in 0..comptime!(8 + INDEX_BITS / 4) {
        let of_high = digit < 8;
        let shift = select(of_high, 28 - 4 * digit, comptime!(INDEX_BITS + 28) - 4 * digit);
        measure_digit(
            numbers,
            &mut own,
            start,
            columns,
            length,
            max,
            temperature,
            high,
            low,
            of_high,
            shift,
            floor_high,
            floor_low,
            search,
        );
        add_up(&own, parts, totals, search);
        let mut value = 0u32;
        #[unroll]
        for step in 0..STEPS {
            value += select(above + totals[step] >= wanted, 1u32, 0u32);
        }
        if value < STEPS as u32 {
            above += totals[value as usize];
        }
        if of_high {
            high |= value << shift;
        } else {
            low |= value << shift;
        }
        sync_cube();
    }
    let mut key = Vector::<u32, Const<2>>::new(0u32);
    key.insert(0usize, high);
    key.insert(1usize, low);
    key
}

/// What this unit's numbers come to whose places have the digits so far, and at `shift` each of 15
/// digits or more.
#[cube]
#[allow(clippy::too_many_arguments)]
fn measure_digit<N: Size>(
    numbers: &[Vector<f32, N>],
    own: &mut Array<f32>,
    start: usize,
    columns: usize,
    length: usize,
    max: f32,
    temperature: f32,
    high: u32,
    low: u32,
    of_high: bool,
    shift: u32,
    floor_high: u32,
    floor_low: u32,
    #[comptime] search: Search,
) {
    #[unroll]
    for step in 0..STEPS {
        own[step] = 0.0f32;
    }
    let mut at = UNIT_POS as usize;
    while at < columns {
        let vector = numbers[start + at];
        #[unroll]
        for lane in 0..N::value() {
            let number = vector.extract(lane);
            let index = at * N::value() + lane;
            let own_high = sort_key(number);
            let own_low = index_key(index);
            // Digits from the highest on, up to the one before.
            let mut key = own_low;
            let mut same = own_high == high && (own_low ^ low) >> shift < 16;
            if of_high {
                key = own_high;
                same = (own_high ^ high) >> shift < 16;
            }
            if same && index < length && not_below(own_high, own_low, floor_high, floor_low) {
                let mut amount = 1.0f32;
                if search.weighted {
                    amount = weight(number, max, temperature);
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

/// What a row's first `length` numbers from a place on come to, in the first of `totals`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn total_from<N: Size>(
    numbers: &[Vector<f32, N>],
    parts: &mut Shared<[f32]>,
    totals: &mut Shared<[f32]>,
    start: usize,
    columns: usize,
    length: usize,
    max: f32,
    temperature: f32,
    high: u32,
    low: u32,
    #[comptime] search: Search,
) {
    let mut own = Array::<f32>::new(STEPS);
    #[unroll]
    for step in 0..STEPS {
        own[step] = 0.0f32;
    }
    let mut at = UNIT_POS as usize;
    while at < columns {
        let vector = numbers[start + at];
        #[unroll]
        for lane in 0..N::value() {
            let number = vector.extract(lane);
            let index = at * N::value() + lane;
            if index < length && not_below(sort_key(number), index_key(index), high, low) {
                let mut amount = 1.0f32;
                if search.weighted {
                    amount = weight(number, max, temperature);
                }
                own[0] += amount;
            }
        }
        at += search.units.comptime();
    }
    add_up(&own, parts, totals, search);
}

/// Sums 15 numbers over the cube.
#[cube]
fn add_up(
    own: &Array<f32>,
    parts: &mut Shared<[f32]>,
    totals: &mut Shared<[f32]>,
    #[comptime] search: Search,
) {
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    #[unroll]
    for step in 0..STEPS {
        let of_plane = plane_sum(own[step]);
        if UNIT_POS_PLANE == 0 {
            parts[plane * STEPS + step] = of_plane;
        }
    }
    sync_cube();
    let unit = UNIT_POS as usize;
    if unit < STEPS {
        let planes = (comptime!(search.units as u32) / PLANE_DIM) as usize;
        let mut total = 0.0f32;
        for plane in 0..planes {
            total += parts[plane * STEPS + unit];
        }
        totals[unit] = total;
    }
    sync_cube();
}
