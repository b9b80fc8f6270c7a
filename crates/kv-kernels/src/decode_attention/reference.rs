//! Weighted decode attention in plain loops: the CPU path, and the oracle of the kernel's tests.

/// One call's arguments, as slices in row-major order.
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a, E> {
    /// `[B, Hq, D]`
    pub query: &'a [E],
    /// `[S, D]`
    pub keys: &'a [E],
    /// `[S, D]`
    pub values: &'a [E],
    /// `[S]`
    pub log_weights: Option<&'a [f32]>,
    /// `[B, Hkv]`
    pub offsets: &'a [i32],
    /// `[B, Hkv]`
    pub lengths: &'a [i32],
    /// `Hkv`
    pub kv_heads: usize,
    /// `Hq / Hkv`
    pub group: usize,
    /// `D`
    pub head_dim: usize,
    /// Factor of `q . k`.
    pub scale: f32,
}

/// The results, in f32.
#[derive(Debug, Clone, PartialEq)]
pub struct Solution {
    /// `[B, Hq, D]`
    pub output: Vec<f32>,
    /// `[B, Hq]`
    pub log_sum_exp: Vec<f32>,
    /// `[S, G]`; 0 outside the ranges. Empty unless asked for.
    pub probabilities: Vec<f32>,
}

/// Solves `problem`, reading each element through `load`.
pub fn solve<E: Copy>(
    problem: &Problem<'_, E>,
    probabilities: bool,
    load: impl Fn(E) -> f32,
) -> Solution {
    let Problem { kv_heads, group, head_dim, .. } = *problem;
    let pairs = problem.offsets.len();
    let slots = problem.keys.len() / head_dim;
    let mut solution = Solution {
        output: vec![0.0; pairs * group * head_dim],
        log_sum_exp: vec![f32::NEG_INFINITY; pairs * group],
        probabilities: if probabilities { vec![0.0; slots * group] } else { Vec::new() },
    };
    debug_assert_eq!(problem.query.len(), pairs * group * head_dim);
    debug_assert_eq!(pairs % kv_heads, 0);

    let mut logits = Vec::new();
    let mut queries = vec![0.0; group * head_dim];
    let mut row = vec![0.0; head_dim];
    for pair in 0..pairs {
        let start = problem.offsets[pair] as usize;
        let length = problem.lengths[pair] as usize;
        if length == 0 {
            continue;
        }
        // Query heads of a group are neighbours, so (pair, g) counts `[B, Hq]` in order.
        let from = &problem.query[pair * group * head_dim..][..group * head_dim];
        queries.iter_mut().zip(from).for_each(|(to, from)| *to = load(*from));
        logits.clear();
        logits.resize(group * length, 0.0);
        for slot in 0..length {
            let key = &problem.keys[(start + slot) * head_dim..][..head_dim];
            row.iter_mut().zip(key).for_each(|(to, from)| *to = load(*from));
            for g in 0..group {
                let weight = problem.log_weights.map_or(0.0, |w| w[start + slot]);
                let query = &queries[g * head_dim..][..head_dim];
                logits[g * length + slot] = dot(query, &row) * problem.scale + weight;
            }
        }
        for g in 0..group {
            let logits = &mut logits[g * length..][..length];
            // NaN is not −∞: it goes on into the sum and shows in the output.
            if logits.iter().all(|logit| *logit == f32::NEG_INFINITY) {
                logits.fill(0.0);
                continue;
            }
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for logit in logits.iter_mut() {
                *logit = (*logit - max).exp();
                sum += *logit;
            }
            logits.iter_mut().for_each(|p| *p /= sum);
            solution.log_sum_exp[pair * group + g] = max + sum.ln();
            if probabilities {
                for (slot, p) in logits.iter().enumerate() {
                    solution.probabilities[(start + slot) * group + g] = *p;
                }
            }
        }
        let output = &mut solution.output[pair * group * head_dim..][..group * head_dim];
        for slot in 0..length {
            let value = &problem.values[(start + slot) * head_dim..][..head_dim];
            row.iter_mut().zip(value).for_each(|(to, from)| *to = load(*from));
            for g in 0..group {
                let p = logits[g * length + slot];
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
