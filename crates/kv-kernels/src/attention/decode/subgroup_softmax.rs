//! The online softmax of a team of units within a plane, for the query heads of a key-value head.
//! The portable kernels of decode attention and sketch attention use it.
//!
//! A team takes a few rows (slots) at a time. Each of its units holds some columns of a row, and so
//! a partial dot product for each row and query head. Pairs of units exchange halves of their
//! partial products, until each unit holds whole products of its own. Each exponential is then
//! taken by one unit, not by all.

use cubecl::client::Client;
use cubecl::prelude::*;

use crate::backend::client::unrolled;
use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::{larger, weight_of};

/// Rows that a team takes at a time, at most.
const MOST_AHEAD: usize = 4;

/// The shape of a team, and of the rows that it takes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ThreadGroup {
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    /// Vectors of a row.
    pub(crate) columns: usize,
    /// Units that share a row, a power of two within a plane.
    pub(crate) team: usize,
    /// Rows that a team takes at a time, a power of two.
    pub(crate) ahead: usize,
}

/// How rows are weighted, and whether their logits are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Weighing {
    /// Whether logarithms of weights are added to logits.
    pub(crate) weighted: bool,
    /// Whether numerators, not the denominator's weights, weigh values.
    pub(crate) numerators: bool,
    /// Whether logits are written.
    pub(crate) logits: bool,
}

impl ThreadGroup {
    /// A shape for a device, with as many rows at a time as registers allow, and as leave each unit
    /// a product of its own.
    pub(crate) fn new(client: &Client, group: usize, columns: usize, team: usize) -> Self {
        let most = unrolled(client, MOST_AHEAD);
        let ahead = (team / group.next_power_of_two()).clamp(1, most);
        Self { group, columns, team, ahead }
    }

    /// Vectors of a row that each unit holds. The last vectors may lie outside the row.
    pub(crate) fn own(self) -> usize {
        self.columns.div_ceil(self.team)
    }

    /// Products of a turn: `ahead` rows for each query head, with the group padded to a power of
    /// two.
    fn products(self) -> usize {
        self.group.next_power_of_two() * self.ahead
    }

    /// Products that a unit holds before exchange number `level`.
    fn before(self, level: usize) -> usize {
        (self.products() >> level).max(1)
    }

    /// The distance between the two units of exchange number `level`.
    fn distance(self, level: usize) -> usize {
        self.team >> (level + 1)
    }

    /// Exchanges of a turn.
    fn levels(self) -> usize {
        self.team.ilog2() as usize
    }

    /// Products that a unit holds after all exchanges.
    fn held(self) -> usize {
        (self.products() / self.team).max(1)
    }

    /// Products of one query head that a unit holds after all exchanges.
    fn rows(self) -> usize {
        self.held().min(self.ahead)
    }

    /// Query heads whose products a unit holds after all exchanges.
    pub(crate) fn heads(self) -> usize {
        self.held() / self.rows()
    }

    /// Whether exchange number `level` is between rows of one query head.
    fn between_rows(self, level: usize) -> bool {
        let before = self.before(level);
        before > 1 && before <= self.ahead
    }

    /// The first unit that holds `product` after all exchanges.
    fn owner(self, product: usize) -> usize {
        let mut unit = 0;
        let mut rest = product;
        for level in 0..self.levels() {
            let half = self.before(level) / 2;
            if half > 0 && rest >= half {
                rest -= half;
                unit += self.distance(level);
            }
        }
        unit
    }
}

/// A unit's columns of the rows that its team takes at a time.
#[derive(CubeType)]
pub(crate) struct Turn<F: Float, N: Size> {
    /// Keys, `[ahead, own]`, in vectors.
    pub(crate) keys: Array<Vector<F, N>>,
    /// Values, `[ahead, own]`, in vectors.
    pub(crate) values: Array<Vector<F, N>>,
    /// The index under which a row's logits are written, `[ahead]`; `none` for no row.
    pub(crate) at: Array<usize>,
    pub(crate) none: usize,
    /// Logarithms of the rows' weights, `[ahead]`, where rows are [`Weighing::weighted`].
    pub(crate) log_weights: Array<f32>,
    /// Weights of the rows' values alone, `[ahead]`, where there are [`Weighing::numerators`].
    pub(crate) numerators: Array<f32>,
}

#[cube]
impl<F: Float, N: Size> Turn<F, N> {
    /// Unset registers for a turn's rows. The index `none` stands for no row.
    pub(crate) fn new(none: usize, #[comptime] shape: ThreadGroup) -> Turn<F, N> {
        let count = comptime!(shape.ahead * shape.own());
        Turn::<F, N> {
            keys: Array::new(count),
            values: Array::new(count),
            at: Array::new(shape.ahead),
            none,
            log_weights: Array::new(shape.ahead),
            numerators: Array::new(shape.ahead),
        }
    }
}

/// A unit's sums over the rows so far.
#[derive(CubeType)]
pub(crate) struct TeamSums<N: Size> {
    /// Sums of weights times values, `[group, own]`, in vectors.
    pub(crate) values: Array<Vector<f32, N>>,
    /// The largest logits of the query heads whose products the unit holds, `[heads]`.
    maxima: Array<f32>,
    /// Sums of weights of these query heads, `[heads]`.
    weights: Array<f32>,
}

#[cube]
impl<N: Size> TeamSums<N> {
    /// The sums before the first row.
    pub(crate) fn of_nothing(#[comptime] shape: ThreadGroup) -> TeamSums<N> {
        let count = comptime!(shape.group * shape.own());
        let heads = comptime!(shape.heads());
        let mut values = Array::<Vector<f32, N>>::new(count);
        let mut maxima = Array::<f32>::new(heads);
        let mut weights = Array::<f32>::new(heads);
        #[unroll]
        for head in 0..heads {
            maxima[head] = f32::new(LOWEST_LOGIT);
            weights[head] = 0.0f32;
        }
        #[unroll]
        for i in 0..count {
            values[i] = Vector::new(0.0f32);
        }
        TeamSums::<N> { values, maxima, weights }
    }
}

/// Adds a turn's rows to the sums: computes their logits, and adds values times the exponentials of
/// logits.
///
/// # Shapes
/// `q` `[group, own]`, in vectors; `logits` `[.., group]`.
#[cube]
pub(crate) fn take_rows<F: Float, N: Size>(
    q: &Array<Vector<f32, N>>,
    turn: &Turn<F, N>,
    running: &mut TeamSums<N>,
    logits: &mut [f32],
    lane: usize,
    #[comptime] weighing: Weighing,
    #[comptime] shape: ThreadGroup,
) {
    let ThreadGroup { group, columns, team, ahead } = shape;
    let own = shape.own().comptime();
    let products = shape.products().comptime();
    let mut parts = Array::<f32>::new(products);
    #[unroll]
    for product in 0..products {
        let (g, a) = comptime!((product / ahead, product % ahead));
        let mut dot = 0.0f32;
        if comptime!(g < group) {
            #[unroll]
            for c in 0..own {
                // A column outside the row meets a zero of the query, but its key may be NaN.
                let mut part =
                    Vector::<f32, N>::cast_from(turn.keys[a * own + c]).dot(q[g * own + c]);
                if comptime!(!columns.is_multiple_of(team)) {
                    part = select(lane + c * team < columns, part, 0.0f32);
                }
                dot += part;
            }
        }
        parts[product] = dot;
    }
    // The unit's first product, and whether no lower unit holds that product too.
    let mut first = 0usize;
    let mut alone = true;
    #[unroll]
    for level in 0..comptime!(shape.levels()) {
        let distance = comptime!(shape.distance(level));
        let half = comptime!(shape.before(level) / 2);
        let upper = lane / distance % 2 == 1;
        if comptime!(half > 0) {
            #[unroll]
            for i in 0..half {
                let (low, high) = (parts[i], parts[half + i]);
                let other = plane_shuffle_xor(select(upper, low, high), comptime!(distance as u32));
                parts[i] = select(upper, high, low) + other;
            }
            first += select(upper, half, 0usize);
        } else {
            parts[0] += plane_shuffle_xor(parts[0], comptime!(distance as u32));
            alone = alone && !upper;
        }
    }

    let rows = comptime!(shape.rows());
    let mut rescales = Array::<f32>::new(comptime!(shape.heads()));
    #[unroll]
    for head in 0..comptime!(shape.heads()) {
        let g = first / ahead + head;
        let mut top = running.maxima[head];
        let mut logits_of = Array::<f32>::new(rows);
        let mut shares = Array::<f32>::new(rows);
        #[unroll]
        for row in 0..rows {
            let a = first % ahead + row;
            let mut to = turn.none;
            let mut log_weight = 0.0f32;
            shares[row] = 1.0f32;
            #[unroll]
            for other in 0..ahead {
                to = select(a == other, turn.at[other], to);
                if comptime!(weighing.weighted) {
                    log_weight = select(a == other, turn.log_weights[other], log_weight);
                }
                if comptime!(weighing.numerators) {
                    shares[row] = select(a == other, turn.numerators[other], shares[row]);
                }
            }
            let i = comptime!(head * rows + row);
            let mut logit = parts[i];
            if comptime!(weighing.weighted) {
                logit += log_weight;
            }
            if to != turn.none && g < group {
                if comptime!(weighing.logits) && alone {
                    logits[to * group + g] = logit;
                }
            } else {
                parts[i] = f32::new(LOWEST_LOGIT);
                logit = f32::new(LOWEST_LOGIT);
            }
            logits_of[row] = logit;
            // A separate numerator may weigh a row whose weight in the denominator is 0.
            top = larger(top, select(weighing.numerators, parts[i], logit));
        }
        #[unroll]
        for level in 0..comptime!(shape.levels()) {
            if comptime!(shape.between_rows(level)) {
                let other = plane_shuffle_xor(top, comptime!(shape.distance(level) as u32));
                top = larger(top, other);
            }
        }
        let rescale = (running.maxima[head] - top).exp();
        running.maxima[head] = top;
        rescales[head] = rescale;
        running.weights[head] *= rescale;
        #[unroll]
        for row in 0..rows {
            let i = comptime!(head * rows + row);
            let p = weight_of(logits_of[row], top);
            running.weights[head] += p;
            if comptime!(weighing.numerators) {
                parts[i] = weight_of(parts[i], top) * shares[row];
            } else {
                parts[i] = p;
            }
        }
    }

    let base = UNIT_POS_PLANE - lane as u32;
    #[unroll]
    for g in 0..group {
        let head = comptime!(g * ahead % shape.held() / rows);
        let owner = comptime!(shape.owner(g * ahead) as u32);
        let rescale = Vector::<f32, N>::new(plane_shuffle(rescales[head], base + owner));
        #[unroll]
        for c in 0..own {
            running.values[g * own + c] *= rescale;
        }
        #[unroll]
        for a in 0..ahead {
            let product = comptime!(g * ahead + a);
            let owner = comptime!(shape.owner(product) as u32);
            let p = plane_shuffle(parts[comptime!(product % shape.held())], base + owner);
            #[unroll]
            for c in 0..own {
                running.values[g * own + c] +=
                    Vector::<f32, N>::cast_from(turn.values[a * own + c]) * Vector::new(p);
            }
        }
    }
}

/// Gives every unit of a team the maxima and sums of all query heads, `[group]` each.
#[cube]
pub(crate) fn gather_sums<N: Size>(
    running: &TeamSums<N>,
    all_maxima: &mut Array<f32>,
    all_sums: &mut Array<f32>,
    lane: usize,
    #[comptime] shape: ThreadGroup,
) {
    let base = UNIT_POS_PLANE - lane as u32;
    #[unroll]
    for g in 0..comptime!(shape.group) {
        let head = comptime!(g * shape.ahead % shape.held() / shape.rows());
        let owner = comptime!(shape.owner(g * shape.ahead) as u32);
        let mut sum = running.weights[head];
        #[unroll]
        for level in 0..comptime!(shape.levels()) {
            if comptime!(shape.between_rows(level)) {
                sum += plane_shuffle_xor(sum, comptime!(shape.distance(level) as u32));
            }
        }
        all_maxima[g] = plane_shuffle(running.maxima[head], base + owner);
        all_sums[g] = plane_shuffle(sum, base + owner);
    }
}
