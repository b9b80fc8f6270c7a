//! Weighted decode attention in plain loops. It is the CPU path, and the oracle of the kernels'
//! tests.

use super::index_sets::{FIRST, FREED, LOCAL, READ, SINKS};

/// One call's arguments, as slices in row-major order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Problem<'a, E> {
    /// `[B, Hq, D]`
    pub(crate) query: &'a [E],
    /// `[S, D]`
    pub(crate) keys: &'a [E],
    /// `[S, D]`
    pub(crate) values: &'a [E],
    /// `[S]`
    pub(crate) log_weights: Option<&'a [f32]>,
    /// `[S]`, weights of the values alone.
    pub(crate) numerators: Option<&'a [f32]>,
    /// Which slots of each range are read.
    pub(crate) view: View<'a>,
    /// `[B, Hkv]`
    pub(crate) offsets: &'a [i32],
    /// `[B, Hkv]`
    pub(crate) lengths: &'a [i32],
    /// `Hkv`
    pub(crate) kv_heads: usize,
    /// `Hq / Hkv`
    pub(crate) group: usize,
    /// `D`
    pub(crate) head_dim: usize,
    /// Factor of `q . k`.
    pub(crate) scale: f32,
}

/// [`crate::SlotView`] on the host.
#[derive(Debug, Clone, Copy)]
pub(crate) enum View<'a> {
    /// All slots of a range.
    All,
    /// The first `sinks` slots, and all slots from `starts` `[B, Hkv]` on.
    Window {
        /// Slots at the start of each range.
        sinks: usize,
        /// The first slot of the window, counted from the range's first slot.
        starts: &'a [i32],
    },
    /// Slots of the pool, `[B, Hkv, N]`; `lengths` has the length of each list.
    List(&'a [i32]),
    /// A table of index sets, one row for each range.
    Sets(&'a [i32]),
}

impl<E> Problem<'_, E> {
    /// The slots that a key-value head attends to.
    fn visible(&self, kv_head: usize) -> Vec<usize> {
        let length = usize::try_from(self.lengths[kv_head]).unwrap_or(0);
        let start = self.offsets[kv_head] as usize;
        match self.view {
            View::All => (start..start + length).collect(),
            View::Window { sinks, starts } => {
                let sinks = sinks.min(length);
                let first = usize::try_from(starts[kv_head]).unwrap_or(0).clamp(sinks, length);
                (0..sinks).chain(first..length).map(|slot| start + slot).collect()
            }
            View::List(slots) => {
                let width = slots.len() / self.offsets.len();
                let pool = self.keys.len() / self.head_dim;
                let listed = &slots[kv_head * width..][..length.min(width)];
                let listed = listed.iter().filter_map(|slot| usize::try_from(*slot).ok());
                listed.filter(|slot| *slot < pool).collect()
            }
            View::Sets(table) => {
                let width = table.len() / self.offsets.len();
                let own = &table[kv_head * width..][..width];
                let field = |at: usize| own[at] as usize;
                let set = &own[field(FIRST)..][..field(READ)];
                let listed = set.iter().map(|token| *token as usize - field(FREED));
                let slots = (0..field(SINKS).min(length)).chain(listed).chain(field(LOCAL)..length);
                slots.map(|slot| start + slot).collect()
            }
        }
    }
}

/// The results of a call, in f32.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Solution {
    /// `[B, Hq, D]`
    pub(crate) output: Vec<f32>,
    /// `[B, Hq]`
    pub(crate) log_sum_exp: Vec<f32>,
    /// Probabilities or logits, `[S, G]`; 0 for slots that are not attended to.
    pub(crate) scores: Vec<f32>,
}

/// The number that is returned for every slot and query head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scores {
    /// No number.
    None,
    /// The attention probability.
    Probabilities,
    /// The logit, with the logarithm of the weight.
    Logits,
}

/// Solves `problem`, reading each element through `load`.
pub(crate) fn solve<E: Copy>(
    problem: &Problem<'_, E>,
    scores: Scores,
    load: impl Fn(E) -> f32,
) -> Solution {
    let Problem { kv_heads, group, head_dim, .. } = *problem;
    let total_kv_heads = problem.offsets.len();
    let slots = problem.keys.len() / head_dim;
    let mut solution = Solution {
        output: vec![0.0; total_kv_heads * group * head_dim],
        log_sum_exp: vec![f32::NEG_INFINITY; total_kv_heads * group],
        scores: if scores == Scores::None { Vec::new() } else { vec![0.0; slots * group] },
    };
    debug_assert_eq!(problem.query.len(), total_kv_heads * group * head_dim);
    debug_assert_eq!(total_kv_heads % kv_heads, 0);

    let mut logits = Vec::new();
    let mut queries = vec![0.0; group * head_dim];
    let mut row = vec![0.0; head_dim];
    for kv_head in 0..total_kv_heads {
        let slots = problem.visible(kv_head);
        let length = slots.len();
        if length == 0 {
            continue;
        }
        // Query heads of a group are neighbours: `kv_head * group + g` counts through `[B, Hq]` in
        // order.
        let from = &problem.query[kv_head * group * head_dim..][..group * head_dim];
        queries.iter_mut().zip(from).for_each(|(to, from)| *to = load(*from));
        logits.clear();
        logits.resize(group * length, 0.0);
        for (at, slot) in slots.iter().enumerate() {
            let key = &problem.keys[slot * head_dim..][..head_dim];
            row.iter_mut().zip(key).for_each(|(to, from)| *to = load(*from));
            for g in 0..group {
                let query = &queries[g * head_dim..][..head_dim];
                logits[g * length + at] = dot(query, &row) * problem.scale;
            }
        }
        for g in 0..group {
            let head = kv_head * group + g;
            let logits = &mut logits[g * length..][..length];
            let weight = |slot: usize| problem.log_weights.map_or(0.0, |weights| weights[slot]);
            let weighted: Vec<f32> =
                logits.iter().zip(&slots).map(|(logit, &slot)| logit + weight(slot)).collect();
            if scores == Scores::Logits {
                for (&logit, &slot) in weighted.iter().zip(&slots) {
                    solution.scores[slot * group + g] = logit;
                }
            }
            // NaN is not −∞: it stays in the sum and shows in the output.
            if weighted.iter().all(|logit| *logit == f32::NEG_INFINITY) {
                logits.fill(0.0);
                continue;
            }
            // A separate numerator may weigh a slot whose weight in the denominator is 0.
            let of = if problem.numerators.is_some() { &*logits } else { &weighted[..] };
            let max = of.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let exponentials: Vec<f32> = weighted.iter().map(|logit| (logit - max).exp()).collect();
            let sum: f32 = exponentials.iter().sum();
            solution.log_sum_exp[head] = max + sum.ln();
            for ((logit, p), &slot) in logits.iter_mut().zip(exponentials).zip(&slots) {
                if scores == Scores::Probabilities {
                    solution.scores[slot * group + g] = p / sum;
                }
                *logit = match problem.numerators {
                    Some(numerators) => (*logit - max).exp() * numerators[slot] / sum,
                    None => p / sum,
                };
            }
        }
        let output = &mut solution.output[kv_head * group * head_dim..][..group * head_dim];
        for (at, slot) in slots.iter().enumerate() {
            let value = &problem.values[slot * head_dim..][..head_dim];
            row.iter_mut().zip(value).for_each(|(to, from)| *to = load(*from));
            for g in 0..group {
                let p = logits[g * length + at];
                if p != 0.0 {
                    let output = &mut output[g * head_dim..][..head_dim];
                    output.iter_mut().zip(&row).for_each(|(o, v)| *o += p * v);
                }
            }
        }
    }
    solution
}

/// A dot product in eight independent sums, so that it vectorises.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 8;
    let mut sums = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f32>() + rest
}
