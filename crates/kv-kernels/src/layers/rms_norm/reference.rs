//! `rms_norm` in plain loops: the CPU path, and the oracle of the kernel's tests.

/// Normalises rows of `weight.len()` elements; `round` rounds to the dtype.
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, round: fn(f32) -> f32) -> Vec<f32> {
    let width = weight.len();
    let mut normed = Vec::with_capacity(x.len());
    for row in x.chunks_exact(width) {
        let mean = row.iter().map(|x| x * x).sum::<f32>() / width as f32;
        let root = (mean + epsilon).sqrt();
        normed.extend(row.iter().zip(weight).map(|(x, weight)| round(x / root) * weight));
    }
    normed
}
