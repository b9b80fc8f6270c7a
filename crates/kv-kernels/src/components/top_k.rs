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

/// A row of numbers.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RankedRow {
    /// Its first vector.
    pub(crate) start: usize,
    /// Its vectors.
    pub(crate) columns: usize,
    /// How many numbers count, from the first on.
    pub(crate) length: usize,
    /// The highest of them, and what their distance from it is divided by, where they count by
    /// [`weight`].
    pub(crate) max: f32,
    pub(crate) temperature: f32,
}

/// A place in the order of numbers: a sort key, and the key of an index.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) high: u32,
    pub(crate) low: u32,
}

/// Shared memory of a search.
#[derive(CubeType)]
pub(crate) struct Counts {
    /// What each plane has counted, `[planes, STEPS]`.
    parts: Shared<[f32]>,
    /// What all planes have, `[STEPS]`.
    pub(crate) totals: Shared<[f32]>,
}

#[cube]
impl Counts {
    /// Room for the counts of so many planes, at most.
    pub(crate) fn room(#[comptime] planes: usize) -> Counts {
        Counts {
            parts: Shared::<[f32]>::new_slice(comptime!(STEPS * planes)),
            totals: Shared::<[f32]>::new_slice(STEPS),
        }
    }
}

/// The highest place from which on a row's numbers, but for those below the floor, come to
/// `wanted`: in count, or in weight. `numbers` are in vectors.
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
    // What lies above all places that the digits so far leave.
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

/// A digit that is searched.
#[derive(CubeType, Clone, Copy)]
struct Digit {
    /// The place as far as it is known.
    high: u32,
    low: u32,
    /// Whether the digit is of the sort key rather than of the index key.
    of_high: bool,
    /// The digit's lowest bit.
    shift: u32,
}

/// What this unit's numbers come to whose places have the digits so far, and at `shift` each of 15
/// digits or more.
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
            // Digits from the highest on, up to the one before.
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

/// What a row's numbers from a place on come to, in the first of the totals.
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

/// Sums 15 numbers over the cube.
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
