//! The kernel of `draw`, with one cube a row of logits.
//!
//! The tokens that a draw keeps are those from a threshold on, which is found by radix select
//! (`components/top_k.rs`), so that nothing is sorted.

use cubecl::prelude::*;

use super::{FLOATS, INTS};
use crate::components::sentinels::NO_INDEX;
use crate::components::sentinels::NO_TOKEN;
use crate::components::sort_key::{index_key, not_below, sort_key};
use crate::components::top_k::{
    Amounts, Counts, Place, RankedRow, Search, threshold, weight, weight_from,
};
use crate::layers::random::kernel::uniform;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// Units of a cube.
    pub(crate) units: usize,
    /// The most planes of a cube.
    pub(crate) planes: usize,
    /// How tokens are counted.
    pub(crate) ones: Amounts,
    /// Whether any row draws at random.
    pub(crate) draws: bool,
    /// Whether any row keeps only its `k` likeliest tokens.
    pub(crate) ranks: bool,
    /// Whether any row keeps only a nucleus (top p).
    pub(crate) nucleus: bool,
}

impl Blueprint {
    fn search(self, amounts: Amounts) -> Search {
        Search { units: self.units, planes: self.planes, amounts }
    }
}

/// The settings of each row.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct DrawRules {
    /// Temperature, top p, min p, `[B, 3]`.
    floats: Box<[f32]>,
    /// Top k, seed (two words), and whether positions advance, `[B, 4]`.
    ints: Box<[i32]>,
}

/// The sequences whose tokens are drawn.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct DrawnSequences {
    /// Draws so far, `[B]`.
    draws: Box<[i32]>,
    /// Positions of the next tokens, `[B]`.
    positions: Box<[i32]>,
    /// The tokens that the model takes next, `[B]`.
    tokens: Box<[i32]>,
    /// The drawn tokens, `[B]`; [`NO_TOKEN`] where a logit is NaN or infinite.
    drawn: Box<[i32]>,
    /// `B`
    rows: usize,
}

/// `logits` `[B, columns]`, in vectors.
#[cube(launch_unchecked)]
pub(crate) fn sample_kernel<N: Size>(
    logits: &[Vector<f32, N>],
    rules: &DrawRules,
    sequences: &mut DrawnSequences,
    columns: usize,
    #[comptime] blueprint: Blueprint,
) {
    let row = CUBE_POS;
    if row >= sequences.rows {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let start = row * columns;
    let units = blueprint.units.comptime();
    let vocabulary = columns * N::value();
    let mut tops = Shared::<[f32]>::new_slice(units);
    let mut ids = Shared::<[i32]>::new_slice(units);
    likeliest(logits, &mut tops, &mut ids, start, columns, blueprint);
    let best = ids[0];
    let max = tops[0];
    let mut chosen = best;
    // All units have read the likeliest token.
    sync_cube();

    if comptime!(blueprint.draws) {
        let temperature = rules.floats[row * FLOATS];
        let min_p = rules.floats[row * FLOATS + 2];
        let mut counted = Counts::room(blueprint.planes);
        let ranked = RankedRow { start, columns, length: vocabulary, max, temperature };
        let mut high = 0u32;
        let mut low = 0u32;
        if comptime!(blueprint.ranks) {
            let wanted = f32::cast_from(rules.ints[row * INTS]);
            let floor = Place { high: 0u32, low: 0u32 };
            let search = comptime!(blueprint.search(blueprint.ones));
            let place = threshold(logits, &mut counted, &ranked, wanted, &floor, search);
            high = place.high;
            low = place.low;
        }
        if comptime!(blueprint.nucleus) {
            let floor = Place { high, low };
            let search = comptime!(blueprint.search(Amounts::Weights));
            weight_from(logits, &mut counted, &ranked, &floor, search);
            let wanted = rules.floats[row * FLOATS + 1] * counted.totals[0];
            sync_cube();
            let place = threshold(logits, &mut counted, &ranked, wanted, &floor, search);
            // Because of rounding in another order, the nucleus may seem to reach below the top k;
            // it is ignored then.
            let within = not_below(place.high, place.low, high, low);
            if within && rules.floats[row * FLOATS + 1] < 1.0 {
                high = place.high;
                low = place.low;
            }
        }

        // Each unit has neighbouring tokens. The first unit whose tokens reach the drawn share has
        // the token.
        let segment = columns.div_ceil(units);
        let first = min(unit * segment, columns);
        let last = min(first + segment, columns);
        let mut own = 0.0f32;
        for at in first..last {
            let vector = logits[start + at];
            #[unroll]
            for lane in 0..N::value() {
                let (logit, id) = (vector.extract(lane), at * N::value() + lane);
                own += kept(logit, id, max, temperature, high, low, min_p);
            }
        }
        tops[unit] = own;
        sync_cube();
        if unit == 0 {
            let mut total = 0.0f32;
            for other in 0..units {
                total += tops[other];
            }
            let seed = row * INTS + 1;
            let mut left = total
                * uniform(
                    u32::cast_from(rules.ints[seed]),
                    u32::cast_from(rules.ints[seed + 1]),
                    u32::cast_from(sequences.draws[row]),
                );
            let mut hit = i32::new(NO_TOKEN as i64);
            for other in 0..units {
                if tops[other] > 0.0 && left >= 0.0 {
                    hit = i32::cast_from(other);
                    counted.totals[0] = left;
                    left -= tops[other];
                }
            }
            ids[0] = hit;
        }
        sync_cube();
        let hit = ids[0];
        sync_cube();
        if hit == i32::cast_from(unit) {
            let mut left = counted.totals[0];
            let mut found = i32::new(NO_TOKEN as i64);
            for at in first..last {
                let vector = logits[start + at];
                #[unroll]
                for lane in 0..N::value() {
                    let (logit, id) = (vector.extract(lane), at * N::value() + lane);
                    let weight = kept(logit, id, max, temperature, high, low, min_p);
                    // Rounding may leave a rest after the last kept token, which is then the drawn
                    // one.
                    if weight > 0.0 && left >= 0.0 {
                        found = i32::cast_from(id);
                        left -= weight;
                    }
                }
            }
            ids[0] = found;
        }
        sync_cube();
        if temperature > 0.0 && best >= 0 && ids[0] >= 0 {
            chosen = ids[0];
        }
    }
    if unit == 0 {
        sequences.drawn[row] = chosen;
        sequences.tokens[row] = select(chosen < 0, i32::new(0), chosen);
        sequences.draws[row] += 1;
        sequences.positions[row] += rules.ints[row * INTS + 3];
    }
}

/// Finds the highest logit and its lowest id, and leaves them in the arrays' first places. The id
/// is negative where a logit is NaN or infinite.
#[cube]
fn likeliest<N: Size>(
    logits: &[Vector<f32, N>],
    tops: &mut Shared<[f32]>,
    ids: &mut Shared<[i32]>,
    start: usize,
    columns: usize,
    #[comptime] blueprint: Blueprint,
) {
    let units = blueprint.units.comptime();
    let unit = UNIT_POS as usize;
    let mut top = 0.0f32;
    let mut id = i32::new(comptime!(i64::from(NO_INDEX)));
    let mut broken = 0u32;
    let mut at = unit;
    while at < columns {
        let vector = logits[start + at];
        #[unroll]
        for lane in 0..N::value() {
            let logit = vector.extract(lane);
            // Told by bits, since compilers may assume that there is no NaN.
            if u32::reinterpret(logit) & 0x7f80_0000u32 == 0x7f80_0000u32 {
                broken = 1u32;
            }
            // A unit's ids ascend, so `>` keeps the lowest of equal ids.
            if logit > top || id == NO_INDEX {
                top = logit;
                id = i32::cast_from(at * N::value() + lane);
            }
        }
        at += units;
    }
    if broken != 0 {
        id = i32::new(NO_TOKEN as i64);
    }
    tops[unit] = top;
    ids[unit] = id;
    sync_cube();
    #[unroll]
    for level in 0..comptime!(units.ilog2()) {
        let stride = comptime!(units >> (level + 1));
        if unit < stride {
            let (mine, other) = (ids[unit], ids[unit + stride]);
            let (my_top, other_top) = (tops[unit], tops[unit + stride]);
            let higher = other_top > my_top || (other_top == my_top && other < mine);
            if mine >= 0 && other != NO_INDEX && (other < 0 || mine == NO_INDEX || higher) {
                ids[unit] = other;
                tops[unit] = other_top;
            }
        }
        sync_cube();
    }
}

/// A token's weight, or 0 where it is not kept.
#[cube]
fn kept(logit: f32, id: usize, max: f32, temperature: f32, high: u32, low: u32, min_p: f32) -> f32 {
    let weight = weight(logit, max, temperature);
    // The likeliest token's weight is exp(0) = 1.
    let stays = not_below(sort_key(logit), index_key(id), high, low) && weight >= min_p;
    select(stays, weight, 0.0f32)
}
