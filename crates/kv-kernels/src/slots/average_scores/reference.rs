//! `average_scores` in plain loops: the CPU path, and the oracle of the kernel's tests.

use super::AverageWeights;

/// Adds scores to the averages `[S]`.
pub(crate) fn average(
    sums: &mut [f32],
    samples: &mut [f32],
    logits: &[f32],
    log_weights: Option<&[f32]>,
    weights: AverageWeights,
) {
    let group = logits.len() / sums.len().max(1);
    for (slot, (sum, samples)) in sums.iter_mut().zip(samples).enumerate() {
        let own = &logits[slot * group..][..group];
        let top = own.iter().copied().fold(f32::MIN, f32::max);
        let mean = own.iter().map(|logit| (logit - top).exp()).sum::<f32>() / group as f32;
        let score = top + mean.ln() - log_weights.map_or(0.0, |weights| weights[slot]);
        *sum = log_add(*sum + weights.old, score + weights.new);
        *samples = log_add(*samples + weights.old, weights.new);
    }
}

/// `ln(exp(a) + exp(b))`
pub(crate) fn log_add(a: f32, b: f32) -> f32 {
    a.max(b) + (1.0 + (-(a - b).abs()).exp()).ln()
}
