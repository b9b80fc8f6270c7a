//! Frequent words: `fwe` of RULER.

use std::collections::HashSet;

use rand::seq::SliceRandom;
use serde::Deserialize;

use super::fit::Fit;
use super::{Generate, Prompt, words};
use crate::random;

/// Made-up words; the `k`-th most frequent one is drawn with probability `k^-alpha / zeta(alpha)`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FrequentWords {
    alpha: f64,
}

/// From here on the three most frequent words differ in number from the fourth, at RULER's alpha.
const LEAST: usize = 80;

impl FrequentWords {
    pub(super) fn generator(&self, seed: u64, fit: &Fit<'_>) -> Generator {
        let vocabulary = (fit.budget() / 50).max(5);
        Generator { alpha: self.alpha, zeta: zeta(self.alpha), vocabulary, seed }
    }

    pub(super) fn fault(&self) -> Option<(&'static str, &'static str, String)> {
        let served = self.alpha > 1.0 && self.alpha <= 4.0;
        (!served).then(|| ("ruler.alpha", "above 1 and at most 4", self.alpha.to_string()))
    }
}

pub(super) struct Generator {
    alpha: f64,
    zeta: f64,
    vocabulary: usize,
    seed: u64,
}

impl Generate for Generator {
    fn least(&self, _question: usize) -> usize {
        LEAST
    }

    fn prompt(&self, question: usize, size: usize) -> Prompt {
        let mut random = random::stream(self.seed, "frequent words", question);
        let mut used = HashSet::new();
        let mut known = Vec::with_capacity(self.vocabulary);
        while known.len() < self.vocabulary {
            let word = words::letters(&mut random, b'a', 6);
            if used.insert(word.clone()) {
                known.push(word);
            }
        }
        // The most frequent one is noise.
        known[0] = "...".into();
        let count =
            |rank: usize| (size as f64 * (rank as f64).powf(-self.alpha) / self.zeta) as usize;
        let counted = known.iter().enumerate();
        let mut list: Vec<&str> = counted
            .flat_map(|(index, word)| std::iter::repeat_n(word.as_str(), count(index + 1)))
            .collect();
        list.shuffle(&mut random);
        Prompt {
            context: format!(
                "Read the following coded text and track the frequency of each coded word. Find \
                 the three most frequently appeared coded words. {}",
                list.join(" ")
            ),
            question: "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. \
                       What are the three most frequently appeared words in the above coded text?"
                .into(),
            answer_prefix: " Answer: According to the coded text above, the three most frequently \
                            appeared words are:"
                .into(),
            references: known[1..4].to_vec(),
        }
    }
}

/// Riemann's zeta function above 1: a sum, and the Euler-Maclaurin formula for the rest of it.
fn zeta(s: f64) -> f64 {
    let terms = 1000;
    let sum: f64 = (1..terms).map(|k| f64::from(k).powf(-s)).sum();
    let n = f64::from(terms);
    sum + n.powf(1.0 - s) / (s - 1.0) + 0.5 * n.powf(-s) + s / 12.0 * n.powf(-s - 1.0)
}

#[cfg(test)]
mod tests {
    #[test]
    fn zeta_of_two_and_four_is_known() {
        let pi = std::f64::consts::PI;
        assert!((super::zeta(2.0) - pi * pi / 6.0).abs() < 1e-12);
        assert!((super::zeta(4.0) - pi.powi(4) / 90.0).abs() < 1e-12);
    }
}
