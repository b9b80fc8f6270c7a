//! The online softmax of a group of threads within a plane, for the query heads of a key-value
//! head.
//!
//! A thread group takes a few rows at a time. Each of its units (threads) has some columns of a
//! row, and so a partial dot product for each row and query head. Units exchange halves of their
//! partials until each is left with whole products of its own, so that an exponential is taken
//! once, not by every unit.

use cubecl::prelude::*;

use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::{larger, weight_of};

/// Rows that a thread group takes at a time, at most.
const MOST_AHEAD: usize = 4;

/// The shape of a thread group and of what it takes at a time.
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

/// What weighs rows, and what becomes of their logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Weighing {
    /// Whether logarithms of weights are added to logits.
    pub(crate) weighted: bool,
    /// Whether numerators weigh values instead.
    pub(crate) numerators: bool,
    /// Whether logits are written.
    pub(crate) logits: bool,
}

impl ThreadGroup {
    /// As many rows at a time as registers allow, and as leave each unit with a product of its own.
    pub(crate) fn new(group: usize, columns: usize, team: usize) -> Self {
        let ahead = (team / group.next_power_of_two()).clamp(1, MOST_AHEAD);
        Self { group, columns, team, ahead }
    }

    /// Vectors of a unit; the last ones of a row may be short of a full turn.
    pub(crate) fn own(self) -> usize {
        self.columns.div_ceil(self.team)
    }

    /// Products of a turn, the group padded to a power of two: `ahead` rows for each query head.
    fn products(self) -> usize {
        self.group.next_power_of_two() * self.ahead
    }

    /// Products that a unit has before an exchange.
    fn before(self, level: usize) -> usize {
        (self.products() >> level).max(1)
    }

    /// Between which units an exchange is.
    fn distance(self, level: usize) -> usize {
        self.team >> (level + 1)
    }

    /// Exchanges.
    fn levels(self) -> usize {
        self.team.ilog2() as usize
    }

    /// Products that a unit is left with.
    fn held(self) -> usize {
        (self.products() / self.team).max(1)
    }

    /// How many of them are of one query head.
    fn rows(self) -> usize {
        self.held().min(self.ahead)
    }

    /// Query heads of which a unit has products.
    pub(crate) fn heads(self) -> usize {
        self.held() / self.rows()
    }

    /// Whether an exchange is between rows of one query head.
    fn between_rows(self, level: usize) -> bool {
        let before = self.before(level);
        before > 1 && before <= self.ahead
    }

    /// The first unit that has a product.
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

/// The rows that a team takes at a time, as a unit has them: some columns of each.
#[derive(CubeType)]
pub(crate) struct Turn<F: Float, N: Size> {
    /// `[ahead, own]`, in vectors.
    pub(crate) keys: Array<Vector<F, N>>,
    /// `[ahead, own]`, in vectors.
    pub(crate) values: Array<Vector<F, N>>,
    /// Where a row's logits go, `[ahead]`; `none` for no row.
    pub(crate) at: Array<usize>,
    pub(crate) none: usize,
    /// Logarithms of the rows' weights, `[ahead]`, where rows are [`Weighing::weighted`].
    pub(crate) log_weights: Array<f32>,
    /// Weights of the rows' values alone, `[ahead]`, where there are [`Weighing::numerators`].
    pub(crate) numerators: Array<f32>,
}

#[cube]
impl<F: Float, N: Size> Turn<F, N> {
    /// Room for a turn's rows; `none` stands for no row.
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
    /// Weights times values, `[group, own]`, in vectors.
    pub(crate) values: Array<Vector<f32, N>>,
    /// The largest logits of the query heads that the unit has products of, `[heads]`.
    maxima: Array<f32>,
    /// Sums of weights of these query heads, `[heads]`.
    weights: Array<f32>,
}

#[cube]
impl<N: Size> TeamSums<N> {
    /// Before the first row.
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

/// Takes a turn's rows into the sums: logits of their keys, and the exponentials of logits times
/// their values.
///
/// # Shapes
/// In vectors: `q` `[group, own]`. `logits` `[.., group]`.
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
                // Columns beyond the row meet a query of zeros, but may hold anything.
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
    // The first product that is this unit's, and whether no unit before it has it too.
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
            // Separate numerators may weigh what the denominator does not.
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

/// Gives every unit of a thread group the maxima and sums of all query heads, `[group]` each.
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
