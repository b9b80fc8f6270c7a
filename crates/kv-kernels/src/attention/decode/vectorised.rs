//! Weighted decode attention on CPUs, by vector instructions and on all cores.
//!
//! A range's slots are split into parts of [`PART`]. Each part has a softmax of its own, relative to
//! the part's largest logit. The parts of a range are then combined, as split-KV kernels do:
//!
//! ```text
//! M = max_p m_p,  s = Σ_p s_p exp(m_p − M),  o = Σ_p o_p exp(m_p − M) / s,  lse = M + ln s
//! ```

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::problem::{Problem, Scores, Solution};
use crate::components::host_vectors::{
    HostFloat, ROWS_TOGETHER, add_four, add_one, dot, exponentials, maximum, sum,
};

/// Slots of a part: enough work for a core to be woken up, and few enough that short ranges reach
/// all cores.
const PART: usize = 256;
/// Multiplications below which one core is faster than several, as waking them takes some 10 µs.
const ALONE: usize = 1 << 17;

/// Solves `problem`.
pub(crate) fn solve<E: HostFloat>(problem: &Problem<'_, E>, scores: Scores) -> Solution {
    let Problem { group, head_dim, .. } = *problem;
    let ranges = problem.offsets.len();
    debug_assert_eq!(problem.query.len(), ranges * group * head_dim);
    let visible: Vec<Vec<usize>> = (0..ranges).map(|range| problem.visible(range)).collect();
    let keeps_logits = scores != Scores::None;
    let tasks: Vec<PartTask<'_, E>> = visible
        .iter()
        .enumerate()
        .flat_map(|(range, slots)| slots.chunks(PART).map(move |slots| (range, slots)))
        .map(|(range, slots)| PartTask { problem, range, slots, keeps_logits })
        .collect();
    let slots: usize = visible.iter().map(Vec::len).sum();
    let arch = Arch::new();
    let parts: Vec<Part> = match 2 * slots * group * head_dim < ALONE {
        true => tasks.iter().map(|task| arch.dispatch(*task)).collect(),
        false => tasks.par_iter().map(|task| arch.dispatch(*task)).collect(),
    };
    let mut solution = Solution::empty(problem, scores);
    let mut next = 0;
    for (range, slots) in visible.iter().enumerate() {
        let own = &parts[next..next + slots.len().div_ceil(PART)];
        next += own.len();
        for g in 0..group {
            let head = range * group + g;
            let output = &mut solution.output[head * head_dim..][..head_dim];
            solution.log_sum_exp[head] = combined(own, g, output);
        }
        let log_sum_exp = &solution.log_sum_exp[range * group..][..group];
        let listed = own.iter().zip(slots.chunks(PART));
        if !keeps_logits {
            continue;
        }
        for (part, slots) in listed {
            for (g, (logits, sum)) in part.logits.chunks(slots.len()).zip(log_sum_exp).enumerate() {
                for (logit, slot) in logits.iter().zip(slots) {
                    solution.scores[slot * group + g] = match scores {
                        Scores::Logits => *logit,
                        // Without any weight there is no probability.
                        _ if *logit == f32::NEG_INFINITY => 0.0,
                        _ => (logit - sum).exp(),
                    };
                }
            }
        }
    }
    solution
}

/// Combines the parts of query head `g`. Writes the output, and returns the log-sum-exp.
fn combined(parts: &[Part], g: usize, output: &mut [f32]) -> f32 {
    let top = parts.iter().map(|part| part.maxima[g]).fold(f32::NEG_INFINITY, f32::max);
    // Equal infinities have a difference of NaN.
    let factor = |part: &Part| match part.maxima[g] == top {
        true => 1.0,
        false => (part.maxima[g] - top).exp(),
    };
    let sum: f32 = parts.iter().map(|part| factor(part) * part.sums[g]).sum();
    if !parts.iter().any(|part| part.weighs[g]) {
        return f32::NEG_INFINITY;
    }
    for part in parts {
        let factor = factor(part) / sum;
        let own = &part.outputs[g * output.len()..][..output.len()];
        output.iter_mut().zip(own).for_each(|(to, from)| *to += factor * from);
    }
    top + sum.ln()
}

/// A part's softmax and output, of each query head of the group.
struct Part {
    /// `[G]`
    maxima: Vec<f32>,
    /// Sums of exponentials relative to the maxima, `[G]`.
    sums: Vec<f32>,
    /// Whether any logit is not −∞, `[G]`. NaN stays in the sums and shows in the output.
    weighs: Vec<bool>,
    /// Values weighted by these exponentials, `[G, D]`.
    outputs: Vec<f32>,
    /// Logits with the logarithms of weights, `[G, slots]`; nothing where no scores are wanted.
    logits: Vec<f32>,
}

/// Some slots of a range.
struct PartTask<'a, E> {
    problem: &'a Problem<'a, E>,
    range: usize,
    slots: &'a [usize],
    /// Whether logits are wanted behind the softmax.
    keeps_logits: bool,
}

impl<E> Clone for PartTask<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for PartTask<'_, E> {}

impl<E: HostFloat> WithSimd for PartTask<'_, E> {
    type Output = Part;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Part {
        let Problem { group, head_dim, .. } = *self.problem;
        let mut logits = self.logits(simd);
        let mut part = Part {
            maxima: vec![f32::NEG_INFINITY; group],
            sums: vec![0.0; group],
            weighs: vec![false; group],
            outputs: vec![0.0; group * head_dim],
            logits: Vec::new(),
        };
        let mut weights = vec![0.0; logits.len()];
        let heads = logits.chunks_mut(self.slots.len()).zip(weights.chunks_mut(self.slots.len()));
        for (g, (logits, weights)) in heads.enumerate() {
            (part.maxima[g], part.sums[g]) = self.softmax(simd, logits, weights);
            part.weighs[g] = logits.iter().any(|logit| *logit != f32::NEG_INFINITY);
        }
        self.add_values(simd, &weights, &mut part.outputs);
        if self.keeps_logits {
            part.logits = logits;
        }
        part
    }
}

impl<E: HostFloat> PartTask<'_, E> {
    /// `scale q · k`, `[G, slots]`.
    #[inline(always)]
    fn logits<S: Simd>(&self, simd: S) -> Vec<f32> {
        let Problem { query, keys, group, head_dim, scale, .. } = *self.problem;
        let mut queries = vec![0.0; group * head_dim];
        let own = &query[self.range * group * head_dim..][..group * head_dim];
        let mut room = vec![0.0; own.len()];
        queries.copy_from_slice(E::widened(own, &mut room));
        let count = self.slots.len();
        let mut logits = vec![0.0; group * count];
        for (at, slot) in self.slots.iter().enumerate() {
            let key = E::widened(&keys[slot * head_dim..][..head_dim], &mut room[..head_dim]);
            for (g, query) in queries.chunks_exact(head_dim).enumerate() {
                logits[g * count + at] = dot(simd, query, key) * scale;
            }
        }
        logits
    }

    /// Adds the logarithms of weights to a head's logits, and writes the exponentials by which
    /// values are weighted. Returns the largest exponent, and the sum of the exponentials.
    #[inline(always)]
    fn softmax<S: Simd>(&self, simd: S, logits: &mut [f32], weights: &mut [f32]) -> (f32, f32) {
        let Problem { log_weights, numerators, .. } = *self.problem;
        weights.copy_from_slice(logits);
        if let Some(log_weights) = log_weights {
            let own = self.slots.iter().map(|&slot| log_weights[slot]);
            logits.iter_mut().zip(own).for_each(|(logit, weight)| *logit += weight);
        }
        // A separate numerator may weigh a slot whose weight in the denominator is 0.
        let Some(numerators) = numerators else {
            weights.copy_from_slice(logits);
            let top = maximum(simd, weights);
            exponentials(simd, weights, top);
            return (top, sum(simd, weights));
        };
        let top = maximum(simd, weights);
        let mut weighted = logits.to_vec();
        exponentials(simd, &mut weighted, top);
        exponentials(simd, weights, top);
        for (weight, &slot) in weights.iter_mut().zip(self.slots) {
            *weight *= numerators[slot];
        }
        (top, sum(simd, &weighted))
    }

    /// Adds the values, weighted by `weights` `[G, slots]`, to `outputs` `[G, D]`.
    #[inline(always)]
    fn add_values<S: Simd>(&self, simd: S, weights: &[f32], outputs: &mut [f32]) {
        let Problem { values, head_dim, .. } = *self.problem;
        let count = self.slots.len();
        let mut rooms: [Vec<f32>; ROWS_TOGETHER] = std::array::from_fn(|_| vec![0.0; head_dim]);
        let row = |slot: usize| &values[slot * head_dim..][..head_dim];
        let mut at = 0;
        while at < count {
            let some = ROWS_TOGETHER.min(count - at);
            let [a, b, c, d] = &mut rooms;
            let slot = |i: usize| self.slots[at + i.min(some - 1)];
            let rows = [
                E::widened(row(slot(0)), a),
                E::widened(row(slot(1)), b),
                E::widened(row(slot(2)), c),
                E::widened(row(slot(3)), d),
            ];
            for (weights, output) in
                weights.chunks_exact(count).zip(outputs.chunks_exact_mut(head_dim))
            {
                let weights = &weights[at..at + some];
                match weights {
                    // The value of a slot without weight may be NaN, which 0 does not undo.
                    [a, b, c, d] if [a, b, c, d].iter().all(|weight| **weight != 0.0) => {
                        add_four(simd, rows, [*a, *b, *c, *d], output);
                    }
                    _ => {
                        let slots = weights.iter().zip(rows).filter(|(weight, _)| **weight != 0.0);
                        slots.for_each(|(weight, row)| add_one(simd, row, *weight, output));
                    }
                }
            }
            at += some;
        }
    }
}
