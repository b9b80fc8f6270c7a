//! Next-token distributions: the log-probability of a token, and the Kullback-Leibler divergence of
//! a policy's distributions from the full cache's.

use anyhow::ensure;
use burn::tensor::Tensor;
use kv_core::read_f32;
use rayon::prelude::*;

use crate::bench::ModelBench;
use crate::record::{Case, metric};

/// The verdict of next-token distributions on an answer whose tokens are fed one by one.
pub(crate) struct Judged {
    /// The most likely token before each token of the answer.
    pub(crate) best: Vec<u32>,
    /// Whether the greedy continuation is the answer.
    pub(crate) exact: bool,
    /// Mean log-probability of the answer's tokens, in nats.
    pub(crate) logprob: f64,
    /// Mean divergence from the full cache's distributions, in nats per token.
    pub(crate) divergence: f64,
}

impl Judged {
    /// Records whether the answer is right, its log-probability, and the divergence.
    pub(crate) fn record(
        &self,
        bench: &mut ModelBench<'_>,
        suite: &str,
        case: &Case,
        setup: (&str, Option<f64>),
    ) {
        let exact = f64::from(u8::from(self.exact));
        bench.record(suite, case, setup, metric::EXACT_MATCH, exact);
        bench.record(suite, case, setup, metric::ANSWER_LOGPROB, self.logprob);
        bench.record(suite, case, setup, metric::KL_DIVERGENCE, self.divergence);
    }
}

/// The logits before each of the tokens that a session was fed, a row of the vocabulary each.
pub(crate) fn rows(before: Vec<Tensor<2>>) -> anyhow::Result<Vec<f32>> {
    Ok(read_f32("logits", Tensor::cat(before, 0))?)
}

/// Judges the logits before each token of an answer, `[N, V]` for `N` tokens, beside the full
/// cache's logits of this shape.
///
/// # Errors
/// Where the answer is empty, and where a log-probability is NaN or infinite.
pub(crate) fn judge_answer(logits: &[f32], full: &[f32], answer: &[u32]) -> anyhow::Result<Judged> {
    ensure!(!answer.is_empty(), "its answer is empty");
    let vocabulary = logits.len() / answer.len();
    let (logprobs, best): (Vec<f64>, Vec<u32>) =
        judge_rows(logits, answer, vocabulary).into_iter().unzip();
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let logprob = mean(&logprobs);
    ensure!(logprob.is_finite(), "the model's output holds NaN or Inf");
    let divergence = mean(&by_position(full, logits, vocabulary));
    Ok(Judged { exact: best == answer, best, logprob, divergence })
}

/// [`judge`] of every row of `[N, V]` logits and its token.
///
/// # Panics
/// If `vocabulary` is 0.
pub(crate) fn judge_rows(logits: &[f32], tokens: &[u32], vocabulary: usize) -> Vec<(f64, u32)> {
    let rows = logits.par_chunks(vocabulary).zip(tokens);
    rows.map(|(logits, &token)| judge(logits, token)).collect()
}

/// Log-softmax of one token, and whether it is the most likely one (ties to the lower id).
pub(crate) fn judge(logits: &[f32], token: u32) -> (f64, u32) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    let best = logits.iter().position(|logit| *logit == max).unwrap_or_default();
    (f64::from(logits[token as usize] - max) - sum.ln(), best as u32)
}

/// `KL(full || policy) = sum_i p_i (ln p_i - ln q_i)` in nats, where `p` and `q` are the softmax of
/// the two logits `[V]` of one position.
///
/// The divergence is at least 0, NaN where a logit is NaN, infinite where the policy rules out a
/// token that the full cache does not.
fn of_position(full: &[f32], policy: &[f32]) -> f64 {
    let (of_full, of_policy) = (log_sum_exp(full), log_sum_exp(policy));
    let terms = full.iter().zip(policy).map(|(&full, &policy)| {
        let log_p = f64::from(full) - of_full;
        let p = log_p.exp();
        // The limit of p ln p, which would be NaN.
        if p == 0.0 { 0.0 } else { p * (log_p - (f64::from(policy) - of_policy)) }
    });
    let sum: f64 = terms.sum();
    // Rounding may leave equal distributions below 0; NaN stays.
    if sum < 0.0 { 0.0 } else { sum }
}

/// The divergence at every position of two `[N, V]` logits, `[N]`.
///
/// # Panics
/// If `vocabulary` is 0.
pub(crate) fn by_position(full: &[f32], policy: &[f32], vocabulary: usize) -> Vec<f64> {
    let rows = full.par_chunks(vocabulary).zip(policy.par_chunks(vocabulary));
    rows.map(|(full, policy)| of_position(full, policy)).collect()
}

/// `ln sum_i exp(logits_i)`, of which the maximum is taken out first.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    /// Plain loops over the definition.
    fn expected(full: &[f32], policy: &[f32]) -> f64 {
        let softmax = |logits: &[f32]| -> Vec<f64> {
            let mut sum = 0.0;
            for &logit in logits {
                sum += f64::from(logit).exp();
            }
            logits.iter().map(|&logit| f64::from(logit).exp() / sum).collect()
        };
        let (p, q) = (softmax(full), softmax(policy));
        let mut divergence = 0.0;
        for i in 0..p.len() {
            divergence += p[i] * (p[i] / q[i]).ln();
        }
        divergence
    }

    #[test]
    fn divergences_are_those_of_plain_loops() {
        let mut draws = ChaCha8Rng::seed_from_u64(3);
        let mut logits = || -> Vec<f32> { (0..7).map(|_| draws.random_range(-4.0..4.0)).collect() };
        for _ in 0..20 {
            let (full, policy) = (logits(), logits());
            let (own, other) = (of_position(&full, &policy), of_position(&policy, &full));
            assert!((own - expected(&full, &policy)).abs() < 1e-12, "{own}");
            // The full cache's probabilities weigh, not the policy's.
            assert!((own - other).abs() > 1e-6);
            // Softmax does not change where all logits do.
            let shifted: Vec<f32> = policy.iter().map(|logit| logit + 1024.0).collect();
            assert!((own - of_position(&full, &shifted)).abs() < 1e-3);
            assert_eq!(of_position(&full, &full), 0.0);
        }
        let (full, policy) = ([logits(), logits()].concat(), [logits(), logits()].concat());
        let rows = [0, 7].map(|at| expected(&full[at..at + 7], &policy[at..at + 7]));
        let found = by_position(&full, &policy, 7);
        assert!(found.len() == 2 && found.iter().zip(rows).all(|(a, b)| (a - b).abs() < 1e-12));
    }

    #[test]
    fn extremes_do_not_overflow() {
        let certain = [1e5, 0.0, -1e5];
        assert_eq!(of_position(&certain, &certain), 0.0);
        assert!((of_position(&certain, &[0.0, 0.0, 0.0]) - 3f64.ln()).abs() < 1e-12);
        let (never, some) = ([0.0, f32::NEG_INFINITY], [0.0, 0.0]);
        assert!((of_position(&never, &some) - 2f64.ln()).abs() < 1e-12);
        assert_eq!(of_position(&some, &never), f64::INFINITY);
        assert!(of_position(&[0.0, f32::NAN], &some).is_nan());
        assert!(of_position(&some, &[0.0, f32::NAN]).is_nan());
    }
}
