//! `signature_scores` in plain loops: the CPU path, and the oracle of the kernel's tests.

use super::LEAST_LOG_SUM;
use crate::archive::layout::host::both;
use crate::archive::layout::{BLOCK, SIGNS, signature_words};

/// The buffers of a pool that scores take.
pub(crate) struct Signatures<'a> {
    pub(crate) signatures: &'a [i32],
    pub(crate) statistics: &'a [i32],
    pub(crate) head_dim: usize,
    /// The factor of logits.
    pub(crate) scale: f32,
}

impl Signatures<'_> {
    /// The scores of the slots from `first` on, for a group's queries beside log-sum-exps.
    pub(crate) fn score(&self, queries: &[f32], sums: &[f32], first: usize, scores: &mut [f32]) {
        let head_dim = self.head_dim;
        let words = signature_words(head_dim);
        for (index, scores) in scores.chunks_mut(BLOCK).enumerate() {
            let block = first / BLOCK + index;
            let statistics = &self.statistics[block * head_dim..][..head_dim];
            let mut factors = vec![0.0; queries.len()];
            let mut bases = vec![0.0; sums.len()];
            let heads = queries.chunks(head_dim).zip(factors.chunks_mut(head_dim));
            for ((query, factors), base) in heads.zip(&mut bases) {
                for ((q, factor), word) in query.iter().zip(factors).zip(statistics) {
                    let [mean, spread] = both(*word);
                    *factor = 2.0 * q * self.scale * spread;
                    *base += q * self.scale * (mean - spread);
                }
            }
            for (at, score) in scores.iter_mut().enumerate() {
                let signs = &self.signatures[block * words * BLOCK..][..words * BLOCK];
                let is_above =
                    |c: &usize| signs[c / SIGNS * BLOCK + at] as u32 >> (c % SIGNS) & 1 == 1;
                let above: Vec<usize> = (0..head_dim).filter(is_above).collect();
                let odds = factors.chunks(head_dim).zip(&bases).zip(sums);
                let odds: Vec<f32> = odds
                    .map(|((factors, base), sum)| {
                        let logit = base + above.iter().map(|&c| factors[c]).sum::<f32>();
                        logit - sum.max(LEAST_LOG_SUM)
                    })
                    .collect();
                let top = odds.iter().copied().fold(f32::MIN, f32::max);
                *score = top + odds.iter().map(|x| (x - top).exp()).sum::<f32>().ln();
            }
        }
    }
}
